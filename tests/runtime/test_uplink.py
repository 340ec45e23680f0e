"""`uplink`: runs whose clients clip, blur, thin out and round what they send."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import quick_run
from pflmpi import tree
from pflmpi.algorithms.fedavg import FedAvg
from pflmpi.analysis.run import open_run
from pflmpi.errors import ConfigError
from pflmpi.learning.client import model_loss
from pflmpi.learning.sgd import train
from pflmpi.messages.kinds import Mean, Shared
from pflmpi.store import metrics_file, run_folder
from planned_run import planned

ALL = {"clip": 0.5, "noise": 0.01, "top_k": 0.1, "quantise": 8}


def settings(uplink, algorithm="fedavg", **sections):
    return quick_run.settings(
        {"algorithm": {"name": algorithm}, "uplink": uplink, "checkpoint": {"keep": 0}}, **sections
    )


def change_of_round(folder, round):
    """What a round has changed in the server's arrays, as one vector."""
    before, after = (run_folder.read_server(folder, number) for number in (round - 1, round))
    return np.concatenate([(after[path] - before[path]).ravel() for path in sorted(after)])


def clients_of(folder, round):
    ((_, state),) = run_folder.read_clients(folder, round, np.arange(7)).values()
    return state


@pytest.mark.parametrize("executor", ["loop", "lanes"])
@pytest.mark.parametrize(
    ("algorithm", "uplink"),
    [("fedavg", ALL), ("fedper", ALL), ("fedgmh", {"quantise": 4}), ("fedfcd", {"quantise": 8})],
)
def test_the_bits_are_the_same_on_any_ranks_and_after_a_resume(algorithm, uplink, executor, tmp_path):
    runtime = {"executor": executor, **({"lanes": 2} if executor == "lanes" else {})}
    raw = settings(uplink, algorithm, runtime=runtime, training={"rounds": 3, "participation": 0.6})
    digests = {quick_run.run(raw, tmp_path / str(ranks), ranks) for ranks in (1, 3)}
    short = {**raw, "training": {**raw["training"], "rounds": 2}}
    quick_run.run(short, tmp_path / "resumed", 2)
    digests.add(quick_run.resume(tmp_path / "resumed", ("training.rounds=3",), 3))
    assert len(digests) == 1
    assert quick_run.run({**raw, "uplink": {}}, tmp_path / "plain") not in digests


def test_a_round_moves_the_model_by_the_clipped_change_of_its_participant(tmp_path):
    raw = settings({"clip": 1e-3}, training={"rounds": 2, "participation": 0.1})
    quick_run.run(raw, tmp_path / "run")
    assert len(run_folder.read_metrics(tmp_path / "run", 1)["participants"]) == 1
    for round in (1, 2):
        assert np.linalg.norm(change_of_round(tmp_path / "run", round)) == pytest.approx(1e-3, rel=1e-3)


@dataclass(frozen=True, kw_only=True)
class SendsChange(FedAvg):
    """FedAvg whose clients send their change, and receive the mean change of the round before."""

    is_change: bool = True
    received_as: str = "change"  # the name of the mean change

    def uplink(self, task):
        return {"change": Mean(task.like(), by="clients", is_change=self.is_change)}

    def downlink(self, task):
        return {"model": Shared(task.like()), self.received_as: Shared(task.like())}

    def init_server(self, task):
        return {"model": task.init(), "change": tree.map(torch.zeros_like, task.init())}

    def publish(self, task, server, receivers):
        return {"model": server["model"], self.received_as: server["change"]}

    def client_update(self, task, client, down, data):
        model = train(task, down["model"], data.passes["train"], model_loss(task), data.learning_rate)
        return {}, {"change": tree.map(torch.sub, model, down["model"])}

    def server_update(self, task, server, up, round):
        return {"model": tree.map(torch.add, server["model"], up["change"]), "change": up["change"]}


def sends_change(uplink, **options):
    base = {"uplink": uplink, "checkpoint": {"keep": 0}, "training": {"rounds": 3, "participation": 0.1}}
    return quick_run.settings(base, algorithm={"name": f"{__file__}:SendsChange", **options})


@pytest.mark.parametrize("executor", ["loop", "lanes"])
@pytest.mark.parametrize("uplink", [{"clip": 1e-3}, {"top_k": 0.1}])
def test_a_mean_of_changes_is_transformed_as_it_is_whatever_has_been_received(uplink, executor, tmp_path):
    digests = set()
    for name, ranks in (("change", 1), ("change", 2), ("mean", 1)):
        raw = {**sends_change(uplink, received_as=name), "runtime": {"device": "cpu", "executor": executor}}
        digests.add(quick_run.run(raw, tmp_path / f"{name}{ranks}", ranks))
    assert len(digests) == 1
    for number in (1, 2, 3):
        server = run_folder.read_server(tmp_path / "change1", number)
        change = np.concatenate([server[path].ravel() for path in server if path.startswith("change/")])
        if "clip" in uplink:
            assert np.linalg.norm(change) == pytest.approx(1e-3, rel=1e-5)
        else:
            assert np.count_nonzero(change) == round(0.1 * len(change))


class SendsDifference(FedAvg):
    """FedAvg whose clients send the change of the model under the model's name."""

    def uplink(self, task):
        return {"model": Mean(task.like(), is_change=True)}

    def client_update(self, task, client, down, data):
        client, up = super().client_update(task, client, down, data)
        return client, {"model": tree.map(torch.sub, up["model"], down["model"])}

    def server_update(self, task, server, up, round):
        return {"model": tree.map(torch.add, server["model"], up["model"])}


def test_clients_that_send_changes_are_tested_after_training_with_their_models(tmp_path):
    accuracies = []
    for number, name in enumerate(("fedavg", f"{__file__}:SendsDifference")):
        base = {"training": {"rounds": 1, "participation": 1.0}, "evaluation": {"when": "both"}}
        quick_run.run(quick_run.settings(base, algorithm={"name": name}), tmp_path / str(number))
        (line,) = metrics_file.read(tmp_path / str(number))
        accuracies.append((line["trained_accuracy_mean"], line["accuracy_mean"]))
    assert accuracies[0] == accuracies[1]


def test_a_mean_that_is_not_received_is_refused_unless_it_is_declared_a_change(tmp_path):
    planned(sends_change({"clip": 1.0}, received_as="mean"), 1)
    with pytest.raises(ConfigError, match=r"sends 'change' without having received the same.*is_change=True"):
        planned(sends_change({"clip": 1.0}, received_as="mean", is_change=False), 1)


def test_what_is_not_sent_waits_with_the_client_and_newcomers_begin_with_nothing(tmp_path):
    raw = settings({"top_k": 0.1}, training={"rounds": 2, "participation": 0.1})
    quick_run.run(raw, tmp_path / "run")
    values = len(change_of_round(tmp_path / "run", 1))
    ((first,), (second,)) = (run_folder.read_metrics(tmp_path / "run", round)["participants"] for round in (1, 2))
    assert np.count_nonzero(change_of_round(tmp_path / "run", 1)) <= round(0.1 * values)
    residual = clients_of(tmp_path / "run", 1)["residual"]
    assert residual.shape == (7, values) and [*np.flatnonzero(residual.any(1))] == [first]
    later = clients_of(tmp_path / "run", 2)["residual"]
    assert {*np.flatnonzero(later.any(1))} == {first, second}
    assert first == second or np.array_equal(later[first], residual[first]), "an absent client keeps it"
    assert not clients_of(tmp_path / "run", 0)["residual"].any()


def test_only_what_travels_is_transformed(tmp_path):
    heads = []
    for number, uplink in enumerate(({}, {"clip": 1e-6, "noise": 1.0})):
        quick_run.run(settings(uplink, "fedper", training={"rounds": 1, "participation": 1.0}), tmp_path / str(number))
        heads.append(clients_of(tmp_path / str(number), 1))
    assert all(np.array_equal(heads[0][path], heads[1][path]) for path in heads[0]) and heads[0]


def test_models_are_tested_after_training_as_training_leaves_them(tmp_path):
    scores = []
    for number, uplink in enumerate(({}, {"clip": 1.0, "noise": 5.0})):
        raw = settings(uplink, training={"rounds": 1, "participation": 1.0}, evaluation={"when": "both"})
        quick_run.run(raw, tmp_path / str(number))
        (line,) = metrics_file.read(tmp_path / str(number))
        scores.append({name: line[name] for name in ("trained_accuracy_mean", "accuracy_mean") if name in line})
    assert len(scores[0]) == 2 and scores[0]["trained_accuracy_mean"] == scores[1]["trained_accuracy_mean"]
    assert scores[0]["accuracy_mean"] != scores[1]["accuracy_mean"]


def test_metrics_and_forecast_count_the_bytes_of_transformed_messages(tmp_path):
    raw = settings({"quantise": 8, "top_k": 0.1}, training={"rounds": 1, "participation": 1.0})
    quick_run.run(raw, tmp_path / "run", 2)
    values, tensors = len(change_of_round(tmp_path / "run", 1)), len(run_folder.read_server(tmp_path / "run", 1))
    expected = [5 * round(0.1 * values) + 4 * tensors] * 7
    assert run_folder.read_bytes(tmp_path / "run", 1)["up"].tolist() == expected
    _, plan = planned(raw, 2).schedule()
    assert plan.up_bytes.tolist() == expected


def test_a_personal_model_of_a_run_with_error_feedback_is_that_of_its_client(tmp_path):
    quick_run.run(settings(ALL, "fedper"), tmp_path / "run")
    module = open_run(tmp_path / "run").model(2)
    assert not [name for name, _ in module.named_buffers() if "residual" in name]
    assert module(torch.zeros(1, 1, 8, 8)).shape == (1, 10)


def test_introductions_are_rounded_too(tmp_path):
    raw = settings({"quantise": 4}, "fedfcd", training={"rounds": 1, "participation": 1.0})
    quick_run.run(raw, tmp_path / "run")
    quick_run.run({**raw, "uplink": {}}, tmp_path / "plain")
    states = [run_folder.read_server(tmp_path / name, 0) for name in ("run", "plain")]
    assert any(not np.array_equal(states[0][path], states[1][path]) for path in states[0])
    up = [run_folder.read_bytes(tmp_path / name, 1)["up"].sum() for name in ("run", "plain")]
    assert up[0] * 3 < up[1]


@pytest.mark.parametrize(
    ("algorithm", "uplink", "words"),
    [
        ("scaffold", {"quantise": 8}, r"uplink.quantise = 8: Scaffold sends 'change' as Sum, of which quantise has no"),
        ("fedamp", {"clip": 1.0}, r"FedAMP sends 'model' as Rows, of which clip has no meaning"),
        ("fedfomo", {"top_k": 0.1}, r"FedFomo sends 'model' as Rows"),
        ("fednova", {"clip": 1.0}, r"FedNova sends 'steps' without having received the same"),
        ("l2gd", {"clip": 1.0}, r"L2GD sends 'model' without having received the same"),
        (
            "fedproto",
            {"clip": 1.0, "noise": 1.0},
            r"FedProto sends 'means' as ClassMeans, of which clip has no meaning",
        ),
        ("fedproto", {"top_k": 0.5}, r"of that only quantise has a meaning"),
        ("fedpac", {"quantise": 8}, r"FedPAC sends 'head' as Rows"),
        ("local", {"quantise": 8}, r"Local sends nothing"),
        ("fedavg", {"noise": 1.0}, r"uplink.noise = 1.0 needs uplink.clip, which is not set"),
        ("fedavg", {"clip": 1.0, "delta": 0.1}, r"uplink.delta = 0.1 needs uplink.noise, which is not set"),
        ("fedavg", {"quantise": 7}, r"uplink.quantise = 7: must be 4, 8 or 16"),
        ("fedavg", {"top_k": 1.0}, r"uplink.top_k = 1.0: must be less than 1"),
        ("fedavg", {"clip": 0}, r"uplink.clip = 0: must be greater than 0"),
        ("fedavg", {"topk": 0.1}, r"unknown key in uplink: 'topk'; did you mean 'top_k'"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(algorithm, uplink, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        quick_run.run(settings(uplink, algorithm), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_statistics_of_batch_norm_are_refused_unless_they_stay_with_the_client(tmp_path):
    raw = settings({"quantise": 8}, model={"name": "resnet18"}, training={"drop_last": True})
    with pytest.raises(ConfigError, match=r"sends stats/.* could make negative \(training.bn: local"):
        planned(raw, 1)
    planned(quick_run.settings(raw, training={"bn": "local"}), 1)
