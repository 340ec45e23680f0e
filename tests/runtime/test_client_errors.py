"""A client that diverges or raises is named; with `client_errors: skip` it is absent from that round, on any ranks."""

import re
from typing import Any

import numpy as np
import pytest
import torch

import failing_clients
import quick_run
from pflmpi.config import load as configuration
from pflmpi.errors import PflmpiError
from pflmpi.experiment.build import load_federation
from pflmpi.learning.participation import Participation
from pflmpi.runtime import client_errors
from pflmpi.store import metrics_file, run_folder, verify

ROUNDS = 4
EXECUTORS = [{"executor": "loop"}, {"executor": "lanes", "lanes": 3}]


def settings(patch: pytest.MonkeyPatch, runtime: dict[str, Any], **how: Any) -> dict[str, Any]:
    return quick_run.settings(
        algorithm=failing_clients.registered(patch, **how),
        training={"rounds": ROUNDS, "participation": 0.6, "batch_size": 4},
        checkpoint={"keep": 0},
        runtime={"client_errors": "skip", **runtime},
    )


def most_steps(raw: dict[str, Any]) -> tuple[int, int]:
    """The client with the most steps per round, and how many."""
    config = configuration.parse(raw)
    samples = load_federation(config).num_train
    steps = [config.training.num_steps(int(count)) for count in samples]
    assert steps.count(max(steps)) == 1, "or several would raise"
    return int(np.argmax(samples)), max(steps)


def drawn(raw: dict[str, Any], client: int) -> list[int]:
    """The rounds that a client was drawn for."""
    config = configuration.parse(raw)
    rounds = Participation(config.training, config.seed, np.ones(config.partition.clients or 0))
    return [round for round in range(1, ROUNDS + 1) if client in rounds.participants(round)]


@pytest.mark.parametrize("runtime", EXECUTORS, ids=["loop", "lanes"])
@pytest.mark.parametrize("how", ["bad_message", "bad_state", "steps"])
def test_a_client_that_fails_is_absent_from_that_round(how, runtime, tmp_path, monkeypatch):
    plain = settings(monkeypatch, runtime)
    client, steps = most_steps(plain)
    bad = drawn(plain, client)[1]
    raw = settings(monkeypatch, runtime, round=bad, **{how: steps if how == "steps" else client})
    digests = {quick_run.run(raw, tmp_path / str(ranks), ranks) for ranks in (1, 3)}
    assert len(digests) == 1, "the same bits on any number of ranks"
    assert digests != {quick_run.run(plain, tmp_path / "plain")}
    for round in range(1, ROUNDS + 1):
        metrics = run_folder.read_metrics(tmp_path / "3", round)
        participants = run_folder.read_metrics(tmp_path / "plain", round)["participants"].tolist()
        absent = [client] if round == bad else []
        assert metrics["skipped"].tolist() == absent
        assert metrics["participants"].tolist() == sorted(set(participants) - set(absent))
        sent = run_folder.read_bytes(tmp_path / "3", round)["up"] > 0
        assert np.flatnonzero(sent).tolist() == metrics["participants"].tolist(), "nothing of it travels"
    (_, state), *_ = run_folder.read_clients(tmp_path / "3", ROUNDS, np.array([client])).values()
    assert state["updates"].tolist() == [len(drawn(plain, client)) - 1.0], "its state stays as it was"
    assert [row["skipped"] for row in metrics_file.read(tmp_path / "3")] == [
        str(int(round == bad)) for round in range(1, ROUNDS + 1)
    ]


@pytest.mark.parametrize("runtime", EXECUTORS, ids=["loop", "lanes"])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("bad_message", r"round {round}: client {client} diverged in client_update \(values in its message model/body"),
        ("bad_state", r"round {round}: client {client} diverged in client_update \(values in its state updates"),
        ("steps", r"Failing.client_update \(round {round}, client {client}\): ValueError: its data is odd"),
    ],
)
def test_by_default_the_run_stops_and_names_it_and_may_go_on_without_it(how, words, runtime, tmp_path, monkeypatch):
    plain = settings(monkeypatch, runtime)
    client, steps = most_steps(plain)
    bad = drawn(plain, client)[1]
    raw = settings(monkeypatch, runtime, round=bad, **{how: steps if how == "steps" else client})
    expected = quick_run.run(raw, tmp_path / "skip")
    raw["runtime"] = {**raw["runtime"], "client_errors": "stop"}
    with pytest.raises(PflmpiError, match=words.format(round=bad, client=client)) as caught:
        quick_run.run(raw, tmp_path / "stop", 2)
    assert caught.value.exit_code == 3
    assert verify.find_newest_good(tmp_path / "stop")[0] == bad - 1
    assert quick_run.resume(tmp_path / "stop", ("runtime.client_errors=skip",), 3) == expected


def test_a_round_without_anybody_left_stops_the_run(tmp_path, monkeypatch):
    raw = settings(monkeypatch, EXECUTORS[0])
    raw["training"] = {**raw["training"], "lr": 1e30}
    with pytest.raises(PflmpiError, match=r"all \d participants of round 1 failed.*client \d diverged") as caught:
        quick_run.run(raw, tmp_path / "run", 3)
    assert caught.value.exit_code == 3
    assert run_folder.rounds(tmp_path / "run") in ([], [0])  # round 0 may not have been complete yet


@pytest.mark.parametrize("runtime", EXECUTORS, ids=["loop", "lanes"])
def test_a_fault_of_the_machine_is_no_clients(runtime, tmp_path, monkeypatch):
    _, steps = most_steps(settings(monkeypatch, runtime))
    raw = settings(monkeypatch, runtime, round=0, steps=steps, fault="MemoryError")
    with pytest.raises(PflmpiError, match="MemoryError"):
        quick_run.run(raw, tmp_path / "run")


@pytest.mark.parametrize("runtime", EXECUTORS, ids=["loop", "lanes"])
def test_a_gpu_without_memory_left_is_one_line_with_what_is_computed_at_once(runtime, tmp_path, monkeypatch):
    _, steps = most_steps(settings(monkeypatch, runtime))
    raw = settings(monkeypatch, runtime, round=0, steps=steps, fault="OutOfMemoryError")
    with pytest.raises(PflmpiError) as caught:
        quick_run.run(raw, tmp_path / "run")
    text = str(caught.value)
    assert re.search(r"\), \d clients? at once, in batches of 4: out of memory on a GPU \(Tried", text)
    assert "2.00 GiB. GPU 0 has a total capacity of 79.1 GiB of which 1.2 GiB is free)" in text
    assert "lower runtime.lanes" in text and "pflmpi plan" in text and "ALLOC_CONF" not in text and "\n" not in text


@pytest.mark.parametrize(
    ("values", "diverged"),
    [([3e38, 3e38], False), ([1.0, torch.nan], True), ([torch.inf, -torch.inf], True), ([-torch.inf, 0.0], True)],
)
def test_only_values_that_are_not_finite_are_refused_and_not_those_whose_sum_is_not(values, diverged):
    rows = torch.tensor([[0.5, 2.0], values])
    errors = client_errors._find_diverged(np.array([3, 7]), {}, {}, {"means": {"a": rows}}, 2, "introduce")
    assert list(errors) == ([7] if diverged else [])


@pytest.mark.parametrize("executor", ["lanes", "loop"])
def test_a_client_that_diverges_is_named_and_its_padding_not_blamed(executor, tmp_path):
    x = 1e3 * np.random.default_rng(0).normal(size=(40, 3))
    np.savez(tmp_path / "my.npz", x=x.astype(np.float32), y=x.sum(1).astype(np.float32))
    raw = quick_run.settings(algorithm={"name": "pfedme"}, runtime={"executor": executor})
    raw["data"], raw["partition"] = (
        {"path": str(tmp_path / "my.npz"), "task": "regression"},
        {"name": "iid", "clients": 3},
    )
    raw["model"], raw["training"] = {"name": "mlp", "hidden": 4}, {"rounds": 1, "lr": 0.1}
    with pytest.raises(PflmpiError, match=r"client 0 diverged in client_update .*; lower training.lr"):
        quick_run.run(raw, tmp_path / "run")
