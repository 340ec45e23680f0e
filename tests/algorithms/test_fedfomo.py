"""FedFomo: weights of others' models from held out samples, and who is sent whose."""

import numpy as np
import pytest
import torch

import comparisons
import numpy_network
import quick_run
import small_task
from pflmpi import tree
from pflmpi.algorithms.base import Round, only
from pflmpi.algorithms.fedfomo import (
    Draws,
    FedFomo,
    choose_candidates,
    draw_numbers,
    mean_losses,
    mix_models,
    normalize_weights,
    weigh_candidates,
)
from pflmpi.analysis.plots import Matrices
from pflmpi.analysis.run import open_run
from pflmpi.analysis.series import diagnostics
from pflmpi.errors import ConfigError
from pflmpi.learning.training import Pass
from pflmpi.messages.kinds import NOBODY
from pflmpi.rng import stream

LR = 0.1


def candidates(ids):
    """A message with the models of the given clients, `comparisons.model(10 + id)`, and zeros for nobody."""
    empty = tree.map(torch.zeros_like, comparisons.model(0))
    models = tree.stack([empty if client == NOBODY else comparisons.model(10 + client) for client in ids])
    return {"candidates": {"model": models, "clients": torch.tensor(ids)}}


def flat(model):
    return np.concatenate([leaf.double().numpy().ravel() for _, leaf in tree.leaves(model)])


def loss_of(model, batches):
    """The mean over all samples of all minibatches."""
    x, y = (np.concatenate(parts) for parts in zip(*(small_task.flat(batch) for batch in batches), strict=True))
    _, scores = numpy_network.forward(small_task.to_numpy(model), x)
    return float(-np.log(numpy_network.softmax(scores)[np.arange(len(y)), y]).mean())


def weight_of(before, candidate, batches):
    distance = np.linalg.norm(flat(candidate) - flat(before))
    return (loss_of(before, batches) - loss_of(candidate, batches)) / (distance + 1e-5)


def test_losses_are_means_over_samples_of_uneven_and_padded_minibatches():
    batches, models = [small_task.batch(0), small_task.batch(1, 2)], [comparisons.model(1), comparisons.model(2)]
    expected = [loss_of(model, batches) for model in models]
    np.testing.assert_allclose(mean_losses(small_task.task(), models, batches), expected, rtol=1e-6)
    wide = small_task.batch(1, 6)
    first = small_task.padded(small_task.batch(0).x, small_task.batch(0).y, torch.ones(6))
    padded = [first, small_task.padded(wide.x, wide.y, torch.tensor([1.0, 1, 0, 0, 0, 0]))]
    cut = [small_task.batch(0), small_task.Batch(wide.x[:2], wide.y[:2])]
    expected = [loss_of(model, cut) for model in models]
    np.testing.assert_allclose(mean_losses(small_task.task(), models, padded), expected, rtol=1e-6)


def test_a_weight_is_the_gain_over_the_distance():
    before = {"body": {"w": torch.tensor([1.0, 2.0])}, "head": {"b": torch.tensor([0.0])}}
    near = {"body": {"w": torch.tensor([1.0, 5.0])}, "head": {"b": torch.tensor([4.0])}}
    weights = weigh_candidates(torch.tensor([2.0, 0.5, 3.0, 2.0]), before, [near, near, before])
    np.testing.assert_allclose(weights, [1.5 / 5.00001, -1 / 5.00001, 0], rtol=1e-6)


def test_models_are_mixed_with_the_positive_weights():
    models = [{"w": torch.tensor([value])} for value in (1.0, 10.0, 100.0)]
    shares = normalize_weights(torch.tensor([1.0, 3.0, -9.0]))
    assert shares.tolist() == [0.25, 0.75, 0]
    np.testing.assert_allclose(mix_models(models, shares)["w"], [0.25 * 1 + 0.75 * 10])
    assert normalize_weights(torch.tensor([-1.0, 0.0, 0.3])).tolist() == [0, 0, 1], "one weight alone is all of it"
    assert normalize_weights(torch.tensor([-1.0, 0.0, -0.3])).tolist() == [1, 0, 0], "no positive weight: the own model"
    assert comparisons.same(mix_models(models, torch.tensor([0.0, 0, 1])), models[2])


def test_a_client_weighs_mixes_and_then_trains_on_the_other_samples():
    algorithm, held_out = FedFomo(received_models=3), [small_task.batch(5), small_task.batch(6, 2)]
    own, before, down = comparisons.model(1), comparisons.model(2), candidates([4, NOBODY, 0])
    data = comparisons.data_of({"train": [small_task.batch(0), small_task.batch(1)], "held_out": held_out}, LR)
    state, up = algorithm.client_update(small_task.task(), {"model": own, "before": before}, down, data)

    models = [own, comparisons.model(14), comparisons.model(10)]
    weights = np.array([weight_of(before, one, held_out) for one in models])
    assert (weights > 0).sum() == 2 and (weights[1:] < 0).any(), "numbers chosen so that one is left out"
    np.testing.assert_allclose(up["weights"]["weights"], [weights[1], 0, weights[2]], rtol=1e-4)
    shares = weights.clip(0) / weights.clip(0).sum()
    of_all = [*shares[:2], 0, shares[2]]
    np.testing.assert_allclose(state["mix"]["shares"], of_all, rtol=1e-4)
    assert state["mix"]["clients"].tolist() == [4, NOBODY, 0]
    w = small_task.to_numpy(tree.map(lambda *rows: sum(s * row for s, row in zip(shares, rows, strict=True)), *models))
    small_task.assert_close(state["before"], w)
    for one in data.passes["train"]:
        slopes = numpy_network.gradients(w, *small_task.flat(one))
        w = {name: w[name] - LR * slopes[name] for name in w}
    small_task.assert_close(state["model"], w)
    assert [*up] == ["weights"], "the model is in the state"


def test_lanes_keep_what_each_of_them_mixed():
    algorithm, task = FedFomo(received_models=2), small_task.task().replace(batched=True)
    clients = [algorithm.init_client(task) | {"before": comparisons.model(2 + one)} for one in (0, 1)]
    downs = [candidates([3, NOBODY]), candidates([1, 2])]
    batches = {"train": small_task.batch(0), "held_out": small_task.batch(5)}
    padded = {name: [small_task.padded(one.x, one.y, torch.ones(6))] for name, one in batches.items()}
    alone, data = (
        comparisons.data_of({name: [one] for name, one in batches.items()}, LR),
        comparisons.data_of(padded, LR),
    )

    def update(client, down):
        return algorithm.client_update(task, client, down, data)[0]["mix"]

    together = torch.func.vmap(update)(tree.stack(clients), tree.stack(downs))
    for lane, (client, down) in enumerate(zip(clients, downs, strict=True)):
        mix = algorithm.client_update(small_task.task(), client, down, alone)[0]["mix"]
        np.testing.assert_allclose(together["shares"][lane], mix["shares"], rtol=1e-4)
        assert together["clients"][lane].tolist() == mix["clients"].tolist()
    assert together["shares"][0].tolist() != together["shares"][1].tolist()


def test_held_out_samples_are_not_trained_on():
    passes = FedFomo(held_out=0.3).passes(small_task.task(), 2)
    assert passes == {
        "train": Pass(held_out=0.3, side="rest"),
        "held_out": Pass(epochs=1, held_out=0.3, side="held_out"),
    }


def test_in_the_first_round_nobody_is_a_candidate_and_the_client_trains_alone():
    """A defect of public code: copies of initial models are candidates."""
    task, algorithm = small_task.task(), FedFomo(received_models=2)
    client = algorithm.init_client(task)
    down = algorithm.publish(task, algorithm.init_server(task), np.array([1, 3]))
    assert down["candidates"]["clients"].tolist() == [[NOBODY] * 2] * 2
    data = comparisons.data_of({"train": [small_task.batch(0)], "held_out": [small_task.batch(5)]}, LR)
    state, up = algorithm.client_update(task, client, candidates([NOBODY] * 2), data)
    assert comparisons.same(state["before"], client["model"])
    assert up["weights"]["weights"].tolist() == [0, 0]
    assert comparisons.same(state["mix"], client["mix"]), "all of its own, also before"
    assert state["mix"]["shares"].tolist() == [1, 0, 0]
    assert state["mix"]["clients"].tolist() == [NOBODY, NOBODY]


def uniform(rng, n, count):
    """The numbers of all clients, as one generator draws them one after the other."""
    ties, lot = rng.random((2, n, n))
    return Draws(ties, lot, rng.random((count, n)))


def others(trained):
    return trained & ~np.eye(len(trained), dtype=bool)


def test_the_numbers_of_some_clients_are_theirs_among_all():
    n, count = 7, 3
    all_draws, subset = uniform(stream(1, 4, -1, "candidates"), n, count), np.array([2, 5, 6])
    for clients in (subset, np.arange(n), subset[:0]):
        draws = draw_numbers(lambda skipped: stream(1, 4, -1, "candidates", skipped), clients, n, count)
        assert np.array_equal(draws.ties, all_draws.ties[clients]) and np.array_equal(draws.lot, all_draws.lot[clients])
        assert np.array_equal(draws.explores, all_draws.explores[:, clients])


def test_the_best_that_have_trained_are_chosen_and_never_oneself():
    affinity = np.array([[9.0, 1, 5, 3], [4, 9, 2, 7], [1, -2, 9, -3], [0, 6, 8, 9]])
    trained, draws = np.array([True, True, False, True]), uniform(np.random.default_rng(0), 4, 3)
    chosen = choose_candidates(affinity, others(trained), 3, 0.0, draws)
    assert chosen.tolist() == [[3, 1, NOBODY], [3, 0, NOBODY], [0, 1, 3], [1, 0, NOBODY]]
    assert (choose_candidates(affinity, np.zeros((4, 4), bool), 2, 0.5, draws) == NOBODY).all()


def test_ties_decide_between_the_best_and_the_lot_where_a_client_explores():
    affinity, left = np.array([[0.0, 2, 2, 1]]), np.array([[False, True, True, True]])
    ties, lot = np.array([[0.9, 0.1, 0.2, 0.9]]), np.array([[0.9, 0.6, 0.3, 0.8]])
    explores = np.array([[0.5], [0.5]])
    draws = Draws(ties, lot, explores)
    greedy, exploring = (choose_candidates(affinity, left, 2, epsilon, draws) for epsilon in (0.0, 1.0))
    assert greedy.tolist() == [[2, 1]] and exploring.tolist() == [[3, 1]]


def test_equal_affinities_are_chosen_with_equal_chances_and_epsilon_explores():
    """For one client with four others, two of them best, over 3000 draws: 0.05 is five standard deviations."""
    n, best = 5, np.array([0.0, 2, 0, 2, 0])
    affinity = np.tile(best, (n, 1))
    rng, left = np.random.default_rng(7), others(np.ones(n, bool))
    greedy = [choose_candidates(affinity, left, 1, 0.0, uniform(rng, n, 1))[0, 0] for _ in range(3000)]
    np.testing.assert_allclose(np.bincount(greedy, minlength=n) / 3000, [0, 0.5, 0, 0.5, 0], atol=0.05)
    chosen = np.array([choose_candidates(affinity, left, 2, 0.4, uniform(rng, n, 2))[0] for _ in range(3000)])
    # The first: one of all four with 0.4, else one of the two best.
    np.testing.assert_allclose(np.bincount(chosen[:, 0], minlength=n) / 3000, [0, 0.4, 0.1, 0.4, 0.1], atol=0.05)
    assert (chosen[:, 0] != chosen[:, 1]).all() and (chosen != 0).all()


def test_the_server_adds_raw_weights_to_those_sent_and_chooses_the_best_for_each_receiver():
    task, algorithm = small_task.task(clients=4), FedFomo(received_models=2, exploration=0.0)
    server = algorithm.init_server(task) | {
        "affinity": torch.tensor([[0.0, 1, 0, 0], [0.5, 0, 0, 2], [3, 1, 0, 0], [0, 0, 0, 0]]),
        "trained": torch.tensor([True, True, False, True]),
        "round": torch.tensor(3),
    }
    sent = algorithm.publish(task, server, np.array([2, 1]))["candidates"]
    assert sent["clients"].tolist() == [[0, 1], [3, 0]]
    up = {"weights": {"weights": torch.tensor([[0.5, -3.0], [-0.25, 0.75]])}}
    new = algorithm.server_update(task, server, up, Round(4, np.array([1, 2]), 0))
    assert new["affinity"].tolist() == [[0, 1, 0, 0], [-2.5, 0, 0, 2.5], [2.75, 1.75, 0, 0], [0, 0, 0, 0]]
    assert new["trained"].tolist() == [True, True, True, True]
    assert new["round"].tolist() == 4
    assert not tree.differences(new, server)

    down = algorithm.publish(task, new, np.array([1, 2]))["candidates"]
    assert down["clients"].tolist() == [[3, 2], [0, 1]]
    empty = algorithm.publish(task, new, np.empty(0, np.int64))["candidates"]
    assert empty["clients"].shape == (0, 2)


@pytest.mark.parametrize("round, epsilon", [(1, 0.3), (4, 0.15), (7, 0.0), (30, 0.0)])
def test_exploration_falls_round_by_round(round, epsilon, monkeypatch):
    seen = []

    def record(affinity, eligible, count, epsilon, draws):
        seen.append(epsilon)
        return np.zeros((len(affinity), count), np.int64)

    monkeypatch.setattr("pflmpi.algorithms.fedfomo.choose_candidates", record)
    algorithm, task = FedFomo(received_models=1), small_task.task()
    algorithm.publish(task, algorithm.init_server(task) | {"round": torch.tensor(round)}, np.array([0]))
    np.testing.assert_allclose(seen, [epsilon], atol=1e-12)


def test_bytes_are_those_of_all_models_that_can_be_sent():
    task, algorithm = small_task.task(), FedFomo(received_models=3)
    numbers = 4 * small_task.FEATURES + small_task.FEATURES + small_task.CLASSES * (small_task.FEATURES + 1)
    assert algorithm.downlink(task)["candidates"].client_bytes(2) == 3 * (4 * numbers + 8)
    assert sum(kind.client_bytes(2) for kind in algorithm.uplink(task).values()) == 4 * numbers + 4 * 3


@pytest.mark.parametrize("models, training, says", [(4, {}, "has 3 others"), (3, {"drop_last": True}, "drop_last")])
def test_what_cannot_work_is_refused(models, training, says):
    with pytest.raises(ConfigError, match=says):
        FedFomo(received_models=models).check(small_task.task(**training), 2)
    FedFomo(received_models=3).check(small_task.task(), 2)


@pytest.mark.parametrize("bn", ["average", "local"])
def test_batch_norm_statistics_are_mixed_or_stay(bn):
    task, algorithm = comparisons.with_batch_norm(bn=bn), FedFomo(received_models=1)
    client = algorithm.init_client(task)
    assert ("stats" in client["before"]) == (bn == "average") and "stats" in client["model"]
    models = tree.stack([only(task.init(), ("body", "head", *task.shared_stats))])
    down = {"candidates": {"model": models, "clients": torch.tensor([1])}}
    data = comparisons.data_of({"train": [small_task.batch(0)], "held_out": [small_task.batch(5)]}, LR)
    state, up = algorithm.client_update(task, client, down, data)
    assert tree.differences(state, client) == [] and [*up] == ["weights"]
    assert ("stats" in algorithm.uplink(task)["model"].like) == (bn == "average")


def test_padding_alone_changes_nothing():
    alone = FedFomo(received_models=2).init_client(small_task.task())["mix"]
    client = {"model": comparisons.model(1), "before": comparisons.model(2), "mix": alone}
    comparisons.check_padding(FedFomo(received_models=2), client, candidates([3, NOBODY]), ("held_out", "train"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three rounds with all its checkpoints, in which others' models are worth something."""
    folder = tmp_path_factory.mktemp("shares") / "run"
    settings = quick_run.settings(
        algorithm={"name": "fedfomo", "received_models": 2},
        training={"participation": 0.7, "lr": 0.5},
        checkpoint={"keep": 0},
    )
    quick_run.run(settings, folder)
    return open_run(folder)


def test_shares_are_those_that_give_the_mixes_on_disk(run):
    """Solved for from a client's mix and the models that were in it; positive where the raw weight was."""
    rounds = [run.round(number) for number in run.rounds]
    plot = diagnostics.plot_diagnostics(rounds)[0]
    assert isinstance(plot, Matrices) and [panel.title for panel in plot.panels] == ["round 1", "round 2", "round 3"]
    mixes = []
    for panel, state in zip(plot.panels, rounds[1:], strict=True):
        last = run.round(state.number - 1)
        gains = state.server["affinity"] - last.server["affinity"]
        for client, row in zip(panel.rows, panel.values, strict=True):
            sent = [int(client_id) for client_id in np.asarray(state.clients["mix/clients"])[client] if client_id >= 0]
            drawn = {
                candidate: share for candidate, share in zip(panel.columns, row, strict=True) if not np.isnan(share)
            }
            assert set(drawn) == {client, *sent}
            before = [path for path in state.clients if path.startswith("before/")]
            paths = [path.replace("before", "model", 1) for path in before]
            models = [[np.asarray(last.clients[path])[client_id] for path in paths] for client_id in (client, *sent)]
            columns = np.stack([np.concatenate([leaf.ravel() for leaf in model]) for model in models], 1)
            mixed = np.concatenate([np.asarray(state.clients[path])[client].ravel() for path in before])
            solved = np.linalg.lstsq(columns.astype(np.float64), mixed.astype(np.float64), rcond=None)[0]
            assert [drawn[candidate] for candidate in (client, *sent)] == pytest.approx(solved, abs=1e-4)
            if drawn[client] < 1:
                assert [drawn[candidate] > 0 for candidate in sent] == [
                    gains[client, candidate] > 0 for candidate in sent
                ]
            mixes.append(drawn[client])
    assert any(0 < own < 1 for own in mixes), "somebody did mix"
