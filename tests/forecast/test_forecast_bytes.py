"""Predicted bytes of messages and state are those that a run moves and keeps, to the byte."""

import numpy as np
import pytest

import quick_run
from every_algorithm import every_algorithm
from pflmpi import tree
from pflmpi.forecast.bytes import compute_state_sizes
from pflmpi.messages.traffic import wire_bytes
from pflmpi.runtime.client_state import allocate
from pflmpi.store import metrics_file
from planned_run import planned, planned_and_run

COLUMNS = ("up_bytes", "down_bytes", "wire_up_bytes", "wire_down_bytes")
# A folded mean; class means with rows per class; rows per client; means to all; an introduction; two kinds at once.
NAMES = ("fedavg", "fedgmh-full", "fedamp", "fedproto", "fedfcd-full", "gpfl")
MESSAGES = {name: every_algorithm()[name] for name in NAMES}
MODELS = [{"name": "mlp", "hidden": 12}, {"name": "cnn", "kernel": 3, "padding": 1, "hidden": 12}]


def check_bytes(raw, ranks, folder):
    world = planned_and_run(raw, ranks, folder)
    opening, *ahead = world.schedule()
    wire = np.array([wire_bytes(one.calls) for one in ahead])
    wire[0] += wire_bytes(opening.calls)
    logical = [(int(one.up_bytes.sum()), int(one.down_bytes.sum())) for one in ahead]
    moved = [[int(row[name]) for name in COLUMNS] for row in metrics_file.read(folder)]
    planned = [[*one, *two] for one, two in zip(logical, wire.tolist(), strict=True)]
    if world.setup.declared.of_clients:  # how much comes from other ranks is known once the server has chosen
        for one, seen in zip(planned, moved, strict=True):
            assert one[:3] == seen[:3] and one[3] >= seen[3]
        return
    assert planned == moved
    assert ranks == 1 or not moved[0][0] or moved[0][2] > 0, "nothing moved between ranks: the test shows nothing"


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", MESSAGES)
def test_bytes_of_each_round_are_those_of_the_run(name, ranks, tmp_path):
    check_bytes(quick_run.settings(MESSAGES[name]), ranks, tmp_path / "run")


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_bound_of_what_is_chosen_is_reached_where_everybody_is(ranks, tmp_path):
    """Each of 7 clients is sent the models of the 6 others once these have trained: after the first round."""
    algorithm = {"name": "fedfomo", "received_models": 6}
    world = planned_and_run(quick_run.settings(algorithm=algorithm, training={"participation": 1.0}), ranks, tmp_path)
    planned = [wire_bytes(schedule.downlink)[1] for schedule in world.schedule()]
    moved = [int(row["wire_down_bytes"]) for row in metrics_file.read(tmp_path)]
    away = [7 - len(hosted) for rank in range(ranks) if len(hosted := world.setup.placement.hosted(rank))]
    models = sum(away) * tree.num_bytes(world.experiment.tasks[0].like())
    ids = (ranks - 1) * 7 * 6 * 8
    assert moved == [ids + ids + models, ids + models, 0], "before the first round nobody has trained"
    assert planned == [ids + models] * 3 + [0]


@pytest.mark.parametrize("absent", ["latest", "last_received"])
@pytest.mark.parametrize("every", [1, 2])
def test_bytes_follow_who_is_tested_with_what(absent, every, tmp_path):
    raw = quick_run.settings(MESSAGES["fedamp"], evaluation={"absent": absent, "every": every})
    check_bytes(raw, 2, tmp_path / "run")


@pytest.mark.parametrize("changes", [{"executor": "lanes", "lanes": 2}, {"server": "dedicated"}, {"server": "shared"}])
def test_bytes_follow_where_clients_live(changes, tmp_path):
    check_bytes(quick_run.settings(MESSAGES["fedgmh-full"], runtime=changes), 3, tmp_path / "run")


@pytest.mark.parametrize("name", MESSAGES)
def test_bytes_to_unseen_clients_are_counted(name, tmp_path):
    sections = MESSAGES[name]
    evaluation = {**sections.get("evaluation", {}), "unseen": 0.3, "every": 2}
    check_bytes(quick_run.settings(sections, evaluation=evaluation), 3, tmp_path / "run")


def test_bytes_of_unlike_models(tmp_path):
    raw = {**quick_run.settings(MESSAGES["fedproto"]), "model": MODELS}
    check_bytes(raw, 3, tmp_path / "run")


@pytest.mark.parametrize("absent", ["latest", "last_received"])
@pytest.mark.parametrize("name", MESSAGES)
def test_state_of_a_rank_is_that_of_its_population(name, absent):
    world = planned({**quick_run.settings(MESSAGES[name], evaluation={"absent": absent}), "model": MODELS[:1]}, 3)
    check_population(world.experiment, world.setup)


def test_state_of_unlike_models_is_that_of_the_population():
    world = planned({**quick_run.settings(MESSAGES["fedproto"]), "model": MODELS}, 3)
    check_population(world.experiment, world.setup)
    assert len(np.unique(compute_state_sizes(world.experiment).client)) == 2


def check_population(experiment, setup):
    sizes = []
    for rank in range(setup.placement.ranks):
        hosted = setup.placement.hosted(rank)
        population = allocate(experiment.cohort, hosted, experiment.templates)
        sizes.append(sum(tree.num_bytes(rows.rows) for rows in population.cohorts))
    assert compute_state_sizes(experiment).hosted(setup.placement).tolist() == sizes


@pytest.mark.parametrize("name", ["fedavg", "fedamp", "fedfomo", "fesem", "fedgmh-full"])
def test_the_servers_state_is_known_without_making_it(name):
    check_server(quick_run.settings(every_algorithm()[name]))


def check_server(raw):
    world = planned(raw, 1)
    made = world.setup.algorithm.init_server(world.setup.task)
    assert compute_state_sizes(world.experiment).server == tree.num_bytes(made)
