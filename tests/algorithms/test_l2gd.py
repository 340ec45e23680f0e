"""L2GD: the coin's runs, the paper's iterations one by one, and what cannot be run."""

import numpy as np
import pytest

import comparisons
import numpy_network
import quick_run
import small_task
from pflmpi.algorithms.base import Round
from pflmpi.algorithms.l2gd import L2GD
from pflmpi.algorithms.local_only import Local
from pflmpi.errors import ConfigError, UserError
from pflmpi.learning.training import Pass
from pflmpi.messages.kinds import Mean

LR = 0.1


def batches_of(client, round, steps):
    return [small_task.batch(1000 * client + 50 * round + step) for step in range(steps)]


def test_rounds_are_the_iterations_of_algorithm_1():
    """The paper's loop, coin by coin: the mean is taken anew in every aggregation, and of every client once."""
    n, p, weight, rounds = 3, 0.6, 0.8, 4
    algorithm, task = L2GD(prox_weight=weight, aggregation_probability=p), small_task.task(clients=n).replace(seed=3)
    runs = [algorithm.runs(task, round) for round in range(1, rounds + 1)]
    assert runs == [(0, 1), (3, 1), (1, 3), (5, 3)]

    alpha = LR * n * (1 - p)
    x = [small_task.to_numpy(comparisons.model(client)) for client in range(n)]
    for round, (aggregations, steps) in enumerate(runs, start=1):
        for _ in range(aggregations):
            mean = {name: np.mean([model[name] for model in x], 0) for name in x[0]}
            share = alpha * weight / (n * p)
            x = [{name: (1 - share) * model[name] + share * mean[name] for name in model} for model in x]
        for step in range(steps):
            for client, model in enumerate(x):
                slope = numpy_network.gradients(model, *small_task.flat(batches_of(client, round, steps)[step]))
                x[client] = {name: model[name] - alpha / (n * (1 - p)) * slope[name] for name in model}

    clients = [{"model": comparisons.model(client)} for client in range(n)]
    server = algorithm.init_server(task)
    for round, (_, steps) in enumerate(runs, start=1):
        down = algorithm.publish(task, server, np.arange(n))
        results = [
            algorithm.client_update(
                task, state, down, comparisons.data_of({"train": batches_of(client, round, steps)}, LR, round)
            )
            for client, state in enumerate(clients)
        ]
        clients = [state for state, _ in results]
        mean = comparisons.mean([up["model"] for _, up in results])
        server = algorithm.server_update(task, server, {"model": mean}, Round(round, np.arange(n), 0))
    for state, expected in zip(clients, x, strict=True):
        small_task.assert_close(state["model"], expected)
    assert algorithm.uplink(task) == {"model": Mean(task.like("body", "head"), by="clients")}


def test_runs_end_as_the_coin_falls():
    task, algorithm = small_task.task(), L2GD(aggregation_probability=0.2)
    runs = np.array([algorithm.runs(task, round) for round in range(2, 3002)])
    # Geometric: means 1 / (1 - p) and 1 / p; four standard errors are 0.04 and 0.33.
    assert abs(runs[:, 0].mean() - 1 / 0.8) < 0.04 and abs(runs[:, 1].mean() - 1 / 0.2) < 0.33
    assert runs.min() == 1
    assert abs((runs[:, 1] == 1).mean() - 0.2) < 0.03 and abs((runs[:, 1] == 2).mean() - 0.8 * 0.2) < 0.03


def test_runs_follow_from_seed_and_round_alone():
    task, algorithm = small_task.task(), L2GD()
    rounds = range(1, 30)
    runs = [algorithm.runs(task, round) for round in rounds]
    assert [algorithm.runs(task, round) for round in reversed(rounds)] == runs[::-1]
    assert [algorithm.runs(task.replace(seed=1), round) for round in rounds] != runs
    assert [algorithm.passes(task, round)["train"] for round in rounds] == [Pass(steps=steps) for _, steps in runs]


def test_the_first_round_has_no_mean_to_be_drawn_to():
    task, algorithm = small_task.task(), L2GD()
    assert algorithm.runs(task, 1)[0] == 0
    data = small_task.data([small_task.batch(0)], LR)
    l2gd_state, _ = algorithm.client_update(task, {"model": comparisons.model(1)}, {"mean": comparisons.model(2)}, data)
    local_state, _ = Local().client_update(task, {"model": comparisons.model(1)}, {}, data)
    assert comparisons.same(l2gd_state["model"], local_state["model"])


def test_the_pull_decays_with_the_learning_rate():
    task, algorithm = small_task.task(), L2GD(prox_weight=1.0, aggregation_probability=0.5)
    round = next(round for round in range(2, 99) if algorithm.runs(task, round)[0] == 2)
    data = comparisons.data_of({"train": []}, 0.4, round)
    state, _ = algorithm.client_update(task, {"model": comparisons.model(1)}, {"mean": comparisons.model(2)}, data)
    own, mean = small_task.to_numpy(comparisons.model(1)), small_task.to_numpy(comparisons.model(2))
    small_task.assert_close(state["model"], {name: 0.36 * own[name] + 0.64 * mean[name] for name in own})


def test_averaged_batch_norm_statistics_are_drawn_too_and_local_ones_stay():
    algorithm = L2GD(aggregation_probability=0.5)
    for bn in ("average", "local"):
        task = comparisons.with_batch_norm(bn=bn)
        client = algorithm.init_client(task)
        client["model"]["stats"]["mean"] += 1
        down = algorithm.publish(task, algorithm.init_server(task), np.arange(4))
        data = comparisons.data_of({"train": []}, 0.4, next(r for r in range(2, 99) if algorithm.runs(task, r)[0] == 1))
        state, up = algorithm.client_update(task, client, down, data)
        assert state["model"]["stats"]["mean"].tolist() == pytest.approx([0.6 if bn == "average" else 1.0] * 5)
        assert ("stats" in up["model"]) == ("stats" in down["mean"]) == (bn == "average")


def test_partial_participation_is_refused(tmp_path):
    L2GD().check(small_task.task(clients=4), 4)
    with pytest.raises(ConfigError, match="needs them all in every round"):
        L2GD().check(small_task.task(clients=4, participation=0.5), 2)
    with pytest.raises(UserError, match=r"training\.participation = 0\.4 gives 3 of 7; set it to 1"):
        quick_run.run(quick_run.settings(algorithm={"name": "l2gd"}), tmp_path / "run")


def test_an_aggregation_step_past_half_the_way_is_refused():
    task = small_task.task(lr=0.1)
    L2GD(prox_weight=1.25, aggregation_probability=0.2).check(task, 4)  # 0.1 * 1.25 * 4 = 1/2
    for options in ({"prox_weight": 1.3}, {"aggregation_probability": 0.1}):
        with pytest.raises(ConfigError, match="must keep within"):
            L2GD(**options).check(task, 4)


def test_padding_alone_changes_nothing():
    comparisons.check_padding(L2GD(), {"model": comparisons.model(1)}, {"mean": comparisons.model(2)}, ("train",))


def test_a_continued_run_goes_on_with_the_same_coin(tmp_path):
    raw = quick_run.settings(algorithm={"name": "l2gd"}, training={"participation": 1.0, "rounds": 4})
    digest = quick_run.run(raw, tmp_path / "whole")
    quick_run.run(quick_run.settings(raw, training={"rounds": 2}), tmp_path / "parts", 2)
    assert quick_run.resume(tmp_path / "parts", ("training.rounds=4",)) == digest
