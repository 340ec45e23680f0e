"""Answers that are mixed for the participants are kept by their clients until they next take part."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import quick_run
from pflmpi import tree
from pflmpi.algorithms.base import Round
from pflmpi.algorithms.fedamp import FedAMP
from pflmpi.algorithms.local_only import Local
from pflmpi.config import load as configuration
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.experiment.build import prepare
from pflmpi.experiment.evaluation import count_trained, count_unseen
from pflmpi.learning.task import Task
from pflmpi.messages import leaf_owners
from pflmpi.messages.kinds import Centres, Compared, Messages, Mixed, Rows, tensor
from pflmpi.runtime.client_state import from_flat
from pflmpi.runtime.contract import check_declarations
from pflmpi.store import run_folder

AMP = {"name": "fedamp", "alpha": 0.5, "sigma": 2.0}
RAW = quick_run.settings(algorithm=AMP, training={"rounds": 4}, checkpoint={"keep": 0})
UNSEEN = {"evaluation": {"unseen": 0.2}}


@pytest.fixture(autouse=True)
def an_owner_for_every_leaf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaf_owners, "_LEAST", 1)


def states(folder: Path, round: int) -> tree.Tree:
    (_, arrays) = run_folder.read_clients(folder, round, np.arange(7))["cohort0"]
    return from_flat(arrays)


def test_participants_have_the_mean_of_equation_4_and_the_absent_keep_theirs(tmp_path: Path) -> None:
    """With whole models in one place, the oracle of the rule; bit by bit."""
    quick_run.run(RAW, tmp_path, ranks=3)
    before = tree.part(tree.part(states(tmp_path, 0), "answered"), "cloud")
    assert all(torch.equal(leaf, tree.at(states(tmp_path, 0), f"model/{path}")) for path, leaf in tree.leaves(before))
    for round in range(1, 5):
        now = states(tmp_path, round)
        models, cloud = tree.part(now, "model"), tree.part(tree.part(now, "answered"), "cloud")
        chosen = torch.from_numpy(run_folder.read_metrics(tmp_path, round)["participants"])
        flat = [tree.flat_rows(tree.at(models, path)[chosen]).double() for path, _ in tree.leaves(cloud)]
        gram = torch.stack([(rows - rows[:1]) @ (rows - rows[:1]).mT for rows in flat]).sum(0)
        norms = gram.diagonal()
        xi = 0.5 * torch.exp(-(norms.unsqueeze(1) + norms - 2 * gram).clamp(min=0) / 2.0) / 2.0
        xi = xi - torch.diag(xi.diagonal())
        xi = xi / xi.sum(1, keepdim=True).clamp(min=1)
        xi = xi + torch.diag(1 - xi.sum(1))
        for (path, found), rows, old in zip(tree.leaves(cloud), flat, dict(tree.leaves(before)).values(), strict=True):
            expected = old.clone()
            expected[chosen] = (xi @ rows).float().view(len(chosen), *found.shape[1:])
            assert torch.equal(found, expected), (round, path)
        before = cloud


@pytest.mark.parametrize(
    "algorithm", [AMP, {"name": "pfedcfr", "alpha": 0.5, "sigma": 2.0}], ids=lambda one: one["name"]
)
def test_the_same_bits_on_any_ranks_and_on_others_after_an_end(algorithm: dict[str, Any], tmp_path: Path) -> None:
    raw = {**RAW, "algorithm": algorithm}
    whole = quick_run.run(raw, tmp_path / "1", 1)
    assert {quick_run.run(raw, tmp_path / str(ranks), ranks) for ranks in (2, 5)} == {whole}
    for first, then in ((3, 2), (1, 5)):
        quick_run.run({**raw, "training": {**raw["training"], "rounds": 2}}, tmp_path / f"{first}-{then}", first)
        assert quick_run.resume(tmp_path / f"{first}-{then}", ("training.rounds=4",), then) == whole


def test_a_newcomer_gets_the_mean_of_all_clients(tmp_path: Path) -> None:
    raw = {**RAW, "partition": {**RAW["partition"], "clients": 9}, **UNSEEN}
    scores = set()
    for ranks in (1, 3):
        quick_run.run(raw, tmp_path / str(ranks), ranks)
        scores.add(run_folder.read_metrics(tmp_path / str(ranks), 4)["unseen_correct"].tobytes())
    assert len(scores) == 1


class Wrong(Local):
    """Declares what the tests say."""

    def init_received(self, task: Task) -> Messages:
        return {"answer": {"w": torch.zeros(3)}}


LIKE: tree.Tree = {"w": tensor(3)}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "of nothing": ({"model": Rows(LIKE)}, {"answer": Mixed(LIKE, "model")}, ["'model'", "no `Compared`", "none"]),
    "other leaves": ({"model": Compared({"w": tensor(4)})}, {"answer": Mixed(LIKE, "model")}, ["[3]", "[4]"]),
    "integers": ({"model": Compared({"w": tensor(3, dtype=torch.int32)})}, {}, ["'model'", "floats"]),
    "centres of nothing": ({"c": Centres(LIKE, of="model", count=2)}, {}, ["uplink: 'c'", "'model'", "no `Compared`"]),
    "centres of other leaves": (
        {"model": Compared({"w": tensor(4)}), "c": Centres(LIKE, of="model", count=2)},
        {},
        ["'c' differs from 'model'", "[3]", "[4]"],
    ),
    "centres that the server has not": (
        {"model": Compared(LIKE), "c": Centres(LIKE, of="model", count=2)},
        {},
        ["'c' are `Centres`", "init_server", "c/w"],
    ),
    "two centres of one message": (
        {"model": Compared(LIKE), **{name: Centres(LIKE, of="model", count=2) for name in "cd"}},
        {},
        ["'c' and 'd' are centres of one message, 'model'"],
    ),
    "first ones of other names": (
        {"model": Compared(LIKE)},
        {"reply": Mixed(LIKE, "model")},
        ["init_received", "reply/w"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_declarations_that_do_not_fit_each_other_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    up, down, words = REFUSED[name]
    monkeypatch.setattr(Wrong, "uplink", lambda self, task: up)
    monkeypatch.setattr(Wrong, "downlink", lambda self, task: down)
    task = prepare(configuration.parse(RAW), torch.device("cpu")).tasks[0]
    with pytest.raises(ConfigError) as caught:
        check_declarations(Wrong(), task)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_what_a_client_predicts_with_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FedAMP, "predicts_with", ("cloud",))
    with pytest.raises(ConfigError, match="predicts_with names 'cloud', a `Mixed` message"):
        prepare(configuration.parse(RAW), torch.device("cpu"))


def test_one_participant_is_answered_with_its_own_model() -> None:
    products: tree.Tree = {"w": torch.tensor([[5.0]], dtype=torch.float64)}
    weights = FedAMP().mixing_weights(None, {"model": products}, Round(1, np.array([3]), 0))  # type: ignore[arg-type]
    assert weights == {"cloud": {"w": torch.ones(1, 1, dtype=torch.float64)}}


def test_a_run_without_the_answers_is_not_tested_with_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As FedAMP's were before the clients kept them."""
    raw = {**RAW, "algorithm": {"name": "local"}, "partition": {**RAW["partition"], "clients": 9}, **UNSEEN}
    quick_run.run(raw, tmp_path)
    experiment = prepare(configuration.parse({**raw, "algorithm": AMP}), torch.device("cpu"))
    for test in (
        lambda: count_unseen(experiment, tmp_path, 4),
        lambda: count_trained(experiment, tmp_path, 4, lambda *_: None, after_training=True),
    ):
        with pytest.raises(CheckpointError, match="earlier pflmpi, whose clients keep other arrays, such as answered/"):
            test()
