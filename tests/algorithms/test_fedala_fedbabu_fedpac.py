"""FedALA, FedBABU and FedPAC compute what their papers say."""

import itertools

import numpy as np
import pytest
import torch

import comparisons
import numpy_network
import quick_run
import small_task
from comparisons import state_of
from pflmpi import tree
from pflmpi.algorithms import fedpac
from pflmpi.algorithms.base import Round
from pflmpi.algorithms.fedala import FedALA
from pflmpi.algorithms.fedbabu import FedBABU
from pflmpi.algorithms.fedpac import FedPAC
from pflmpi.cli import main
from pflmpi.errors import ConfigError
from pflmpi.learning.client import class_means
from pflmpi.store import run_folder


def test_fedbabu_trains_the_body_alone_under_the_initial_head():
    task, algorithm = small_task.task(), FedBABU()
    client, received = algorithm.init_client(task), comparisons.model(1)
    batches = [small_task.batch(seed) for seed in (0, 1)]
    state, up = algorithm.client_update(
        task, client, {"body": {"body": received["body"]}}, comparisons.data_of({"train": batches})
    )
    w = small_task.to_numpy({"body": received["body"], **client})
    for batch in batches:
        slopes = numpy_network.gradients(w, *small_task.flat(batch))
        w = {**w, **{name: w[name] - 0.1 * slopes[name] for name in ("W1", "b1")}}
    small_task.assert_close({**up["body"], **state}, w)
    assert list(up) == ["body"] and list(up["body"]) == ["body"], "the head never travels"
    assert comparisons.same(state, client) and algorithm.averaged_by() == "samples"


@pytest.mark.parametrize("fine_tuned, moved", [("model", ("W1", "b1", "W2", "b2")), ("head", ("W2", "b2"))])
def test_fedbabu_is_tested_after_fine_tuning_the_fresh_body(fine_tuned, moved):
    task, algorithm = small_task.task(), FedBABU(fine_tuned=fine_tuned)
    assert algorithm.passes(task, 1)["fine_tuning"].epochs == 5 and FedBABU().fine_tuned == "model"
    client, received, batch = algorithm.init_client(task), comparisons.model(1), small_task.batch(3)
    data = comparisons.data_of({"fine_tuning": [batch]})
    adapted = algorithm.adapt(task, client, {"body": {"body": received["body"]}}, data)
    w = small_task.to_numpy({"body": received["body"], **client})
    slopes = numpy_network.gradients(w, *small_task.flat(batch))
    small_task.assert_close(adapted, {**w, **{name: w[name] - 0.1 * slopes[name] for name in moved}})


def test_fedala_trains_its_weights_as_equation_5_says():
    task, algorithm = small_task.task(), FedALA(weight_lr=0.7, longest=1)
    own, received = comparisons.model(1), comparisons.model(2)
    batch, state = small_task.batch(0), algorithm.init_client(task)
    state = {**state, "model": own, "again": torch.tensor(1)}
    data = comparisons.data_of({"weights0": [batch], "train": []})
    trained, up = algorithm.client_update(task, state, {"model": received}, data)
    # By hand: the gradient of the head's parameters at W = 1, where the mix is the received model.
    z = task.features(received, batch.x)
    scores = task.logits(received["head"], z).softmax(1) - torch.eye(3)[batch.y]
    slopes = {"weight": scores.mT @ z / len(z), "bias": scores.mean(0)}
    for name, slope in slopes.items():
        apart = received["head"][name] - own["head"][name]
        weight = (1 - 0.7 * slope * apart).clamp(0, 1)
        torch.testing.assert_close(tree.at(trained, f"weights/head/{name}"), weight, rtol=0, atol=1e-6)
        mixed = own["head"][name] + apart * weight
        torch.testing.assert_close(tree.at(up["model"], f"head/{name}"), mixed, rtol=0, atol=1e-6)
    assert comparisons.same(trained["model"]["body"], received["body"]), "lower layers are the received ones"


def test_fedala_trains_weights_until_they_converge_and_then_for_an_epoch(tmp_path):
    raw = quick_run.settings(
        algorithm={"name": "fedala", "longest": 13},
        training={"participation": 1.0},
        runtime={"executor": "loop"},
        checkpoint={"keep": 0},
    )
    quick_run.run(raw, tmp_path / "run")
    due = [comparisons.state_of(tmp_path / "run", round) for round in range(4)]
    assert [[set(values[f"clients/{name}"].tolist()) for name in ("again", "start")] for values in due] == [
        [{0}, {0}],
        [{1}, {1}],
        [{1}, {0}],
        [{1}, {0}],
    ]
    weights = [values["clients/weights/head/weight"] for values in due]
    assert (weights[1] == 1).all() and (weights[2] < 1).any() and not np.array_equal(weights[2], weights[3])
    assert all(((values >= 0) & (values <= 1)).all() for values in weights)


def test_fedpac_combines_heads_with_the_best_weights():
    task, algorithm = small_task.task(clients=3), FedPAC()
    rng = np.random.default_rng(0)
    labels, clients = torch.tensor([0, 1, 1, 2, 0]), torch.tensor([2, 2, 5, 5, 9])
    counts, means = torch.tensor([3, 1, 2, 2, 4]), torch.from_numpy(rng.normal(size=(5, small_task.FEATURES)) * 0.3)
    before = {"labels": labels, "means": means.float(), "clients": clients, "counts": counts}
    variances = torch.tensor([0.4, 0.2, 0.7])
    up = {"before": before, "variance": {"value": variances}}
    combination = algorithm.combination(task, up, np.array([2, 5, 9]))
    h = np.zeros((3, 3, small_task.FEATURES))
    h[0, 0], h[0, 1] = 0.75 * means[0], 0.25 * means[1]
    h[1, 1], h[1, 2], h[2, 0] = 0.5 * means[2], 0.5 * means[3], means[4]

    def worth(client, weights):
        bias = np.tensordot(weights, h[client] - h, 1)
        return float((weights**2 * variances.numpy()).sum() + (bias**2).sum())

    grid = [np.array([a, b, 1 - a - b]) for a, b in itertools.product(np.linspace(0, 1, 101), repeat=2) if a + b <= 1]
    for client in range(3):
        best = min(grid, key=lambda weights: worth(client, weights))
        np.testing.assert_allclose(combination[client], best, atol=0.011)
        assert worth(client, combination[client]) <= worth(client, best) + 1e-6
    np.testing.assert_allclose(combination.sum(1), 1)


def test_fedpac_combines_heads_of_clients_with_the_same_features():
    task, algorithm = small_task.task(clients=3), FedPAC()
    means = torch.full((3, small_task.FEATURES), 40.0)
    before = {
        "labels": torch.zeros(3, dtype=torch.int32),
        "means": means,
        "clients": torch.arange(3),
        "counts": torch.tensor([9, 9, 9]),
    }
    before["means"][2] = 0
    combination = algorithm.combination(
        task, {"before": before, "variance": {"value": torch.tensor([0.0, 0.0, 1.0])}}, np.arange(3)
    )
    np.testing.assert_allclose(combination[:2], [[0.5, 0.5, 0], [0.5, 0.5, 0]], atol=1e-6)


def test_fedpac_combines_heads_of_so_many_clients_that_all_weights_are_small(monkeypatch):
    monkeypatch.setattr(fedpac, "_MIN_WEIGHT", 0.4)
    np.testing.assert_allclose(fedpac._minimize(np.eye(3)), [1 / 3] * 3)


def test_fedpac_gives_each_participant_its_combination_or_its_own_head_back():
    task, who = small_task.task(clients=3), np.array([0, 2])
    heads = {"weight": torch.randn(2, 3, small_task.FEATURES), "bias": torch.randn(2, 3)}
    means = {"labels": torch.tensor([0, 0]), "means": torch.ones(2, small_task.FEATURES), "clients": torch.tensor(who)}
    up = {"body": {}, "head": heads, "variance": {"value": torch.tensor([0.1, 0.3])}}
    up |= {name: {**means, "counts": torch.tensor([2, 2])} for name in ("before", "after")}
    for combine, first in ((True, 0.75), (False, 1.0)):  # the same features: weights go by 1 / variance
        algorithm = FedPAC(combine_heads=combine)
        new = algorithm.server_update(task, algorithm.init_server(task), up, Round(1, who, 0))["heads"]
        expected = first * heads["weight"][0] + (1 - first) * heads["weight"][1]
        torch.testing.assert_close(new["weight"][0], expected, rtol=0, atol=1e-6)
        assert torch.equal(new["weight"][1], task.init()["head"]["weight"]), "absent clients keep theirs"


def test_fedpac_trains_the_head_first_and_aligns_the_body_to_the_global_means():
    task, algorithm = small_task.task(), FedPAC(alignment_weight=0.7, head_lr=0.3)
    received, head_batch, body_batch = comparisons.model(1), small_task.batch(0), small_task.batch(1)
    anchors = torch.randn(3, small_task.FEATURES, generator=torch.Generator().manual_seed(0))
    down = {
        "body": {"body": received["body"]},
        "head": received["head"],
        "means": {"mean": anchors, "known": torch.tensor([1.0, 1.0, 0.0])},
    }
    data = comparisons.data_of({"head": [head_batch], "body": [body_batch]}, decay=0.5)
    own = class_means(task, received, data)
    _, up = algorithm.client_update(task, {}, down, data)

    w = small_task.to_numpy(received)
    slopes = numpy_network.gradients(w, *small_task.flat(head_batch))
    w = {**w, **{name: w[name] - 0.3 * 0.5 * slopes[name] for name in ("W2", "b2")}}
    x, y = small_task.flat(body_batch)
    targets = torch.where(torch.tensor([[True], [True], [False]]), anchors, own["means"]).double().numpy()
    pull = 0.7 * 2 * (numpy_network.forward(w, x)[0] - targets[y]) / (len(y) * small_task.FEATURES)
    slopes = numpy_network.gradients(w, x, y, pull)
    w = {**w, **{name: w[name] - 0.1 * slopes[name] for name in ("W1", "b1")}}
    small_task.assert_close({**up["body"], "head": up["head"]}, w)


def test_fedpac_averages_class_means_by_their_counts_and_keeps_those_of_absent_classes():
    algorithm, d = FedPAC(), small_task.FEATURES
    old = {"mean": torch.full((3, d), 7.0), "known": torch.tensor([0.0, 1.0, 0.0])}
    up = {"labels": torch.tensor([0, 0]), "counts": torch.tensor([3, 1]), "means": torch.ones(2, d)}
    up["means"][1] = 5.0
    new = algorithm._global_means(old, up)
    assert new["mean"][:, 0].tolist() == [2.0, 7.0, 7.0] and new["known"].tolist() == [1.0, 1.0, 0.0]


def test_fedpac_measures_the_variance_of_features():
    task, algorithm = small_task.task(), FedPAC()
    batch, model = small_task.batch(0, size=40), comparisons.model(3)
    data = small_task.data([batch])
    variance = algorithm._feature_variance(task, model, class_means(task, model, data), data)
    z, y = task.features(model, batch.x).double(), batch.y
    n, expected = len(y), z.square().sum(1).mean()
    for label in range(3):
        share = (y == label).double().mean()
        expected = expected - share**2 * z[y == label].mean(0).square().sum()
    torch.testing.assert_close(variance.double(), expected / n, rtol=1e-5, atol=0)


def test_fedpac_trains_the_head_and_then_the_aligned_body(tmp_path):
    accuracies = []
    for name in ("fedpac", "fedala", "fedbabu"):
        raw = quick_run.settings(
            algorithm={"name": name},
            training={"participation": 1.0, "rounds": 8},
            checkpoint={"every": 8},
        )
        quick_run.run(raw, tmp_path / name)
        accuracies.append(float(run_folder.read_metrics(tmp_path / name, 8)["accuracy_mean"]))
    assert min(accuracies) > 0.7, accuracies


N = quick_run.QUICK["partition"]["clients"]


def settings(**sections):
    return quick_run.settings(algorithm={"name": "fedbabu", "fine_tuning_epochs": 2}, **sections)


def test_the_head_never_changes_and_only_the_body_travels(tmp_path):
    quick_run.run(settings(checkpoint={"keep": 0}), tmp_path / "run")
    first, last = (state_of(tmp_path / "run", round) for round in (0, 3))
    assert np.array_equal(first["clients/head/weight"], last["clients/head/weight"])
    assert (first["clients/head/weight"] == first["clients/head/weight"][0]).all(), "one head for all"
    assert not np.array_equal(first["server/body/body/fc1/weight"], last["server/body/body/fc1/weight"])
    body = sum(array.nbytes for path, array in last.items() if path.startswith("server/"))
    moved, participants = run_folder.read_bytes(tmp_path / "run", 3), run_folder.read_metrics(tmp_path / "run", 3)
    assert moved["up"].tolist() == np.where(np.isin(np.arange(N), participants["participants"]), body, 0).tolist()


def test_it_is_tested_with_a_fine_tuned_model(tmp_path):
    accuracies = []
    for epochs in (1, 8):
        raw = quick_run.settings(algorithm={"name": "fedbabu", "fine_tuning_epochs": epochs})
        accuracies.append(quick_run.run(raw, tmp_path / str(epochs)) and _accuracy(tmp_path / str(epochs)))
    assert accuracies[0] < accuracies[1]


@pytest.mark.parametrize("model", ["logistic", {"name": "mlp", "trainable": ["head.*"]}])
@pytest.mark.parametrize("fine_tuned", ["head", "body"])
def test_a_part_is_fine_tuned_where_there_are_two_or_refused_before_the_start(fine_tuned, model, tmp_path):
    raw = quick_run.settings(algorithm={"name": "fedavg_ft", "fine_tuned": fine_tuned}, model=model)
    with pytest.raises(ConfigError, match=f"fine_tuned = {fine_tuned}, and beside its head .* nothing to train"):
        quick_run.run(raw, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_export_says_why_there_is_no_one_model(tmp_path, capfd):
    quick_run.run(settings(), tmp_path / "run")
    code = main(["export", str(tmp_path / "run"), "--client", "2", "-o", str(tmp_path / "client.npz")])
    assert code == 2 and "a model that it adapts before a test" in capfd.readouterr().err


def test_probe_and_report_know_it(tmp_path):
    run = tmp_path / "run"
    quick_run.run(settings(checkpoint={"keep": 0}), run)
    assert main(["probe", str(run), "--samples", "40"]) == 0
    assert main(["report", str(run), "--out", str(tmp_path / "page")]) == 0
    figures = {path.stem for path in (tmp_path / "page").rglob("*.csv")}
    assert {"accuracy_over_rounds", "clients_at_the_end"} <= figures
    assert "layer_cka" not in figures, "before fine-tuning the models of all clients are equal"


def _accuracy(folder):
    return float(run_folder.read_metrics(folder, 3)["accuracy_mean"])
