"""Every option of training, evaluation and checkpoints does what it says, on one rank and on two."""

from itertools import pairwise
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

import quick_run
from both_ways import run
from every_algorithm import every_algorithm
from pflmpi.algorithms import ALGORITHMS
from pflmpi.config.load import parse
from pflmpi.errors import CheckpointError, UserError
from pflmpi.store import metrics_file, run_folder
from pflmpi.testing import conformance
from pflmpi.testing.conformance import Runs

OPTIONS: list[dict[str, Any]] = [
    {"precision": "bf16"},
    {"drop_last": True},
    {"steps": 3},
    {"epochs": 2},
    {"momentum": 0.9},
    {"weight_decay": 0.01},
    {"lr_decay": 0.5},
    {"init": "per_client"},
    {"optimizer": "adam"},
    {"optimizer": "adam", "weight_decay": 0.1},
    {"optimizer": "adamw", "weight_decay": 0.1},
    {"optimizer": "adam", "keep_optimizer": True},
    {"lr_decay": 0.5, "decay_by": "participations"},
    {"schedule": "step", "lr_decay": 0.5, "decay_rounds": 1, "warmup": 1},
    {"schedule": "cosine", "decay_rounds": 3},
    {"clip_norm": 0.1},
    {"label_smoothing": 0.1},
    {"micro_batch": 3},
]


@pytest.mark.parametrize("executor, ranks", [("loop", 1), ("lanes", 2)])
def test_every_training_option_changes_the_result(executor, ranks, tmp_path):
    digests = {}
    for number, change in enumerate([{}, *OPTIONS]):
        raw = quick_run.settings(
            algorithm={"name": "fedper"},
            training={"rounds": 2, "batch_size": 8, **change},
            runtime={"executor": executor, "lanes": 3},
        )
        digests[str(change)] = quick_run.run(raw, tmp_path / str(number), ranks)
    assert len(set(digests.values())) == len(digests), digests


TOGETHER: list[dict[str, Any]] = [
    {
        "training": {
            "micro_batch": 3,
            "batch_size": 8,
            "selection": "by_samples",
            "dropout": 0.3,
            "participation": 0.6,
        },
    },
    {
        "data": {"transform": ["random_crop", "horizontal_flip"], "validation": 0.2},
        "training": {"selection": "round_robin", "decay_by": "participations", "lr_decay": 0.5},
    },
]


@pytest.mark.parametrize("executor", ["loop", "lanes"])
@pytest.mark.parametrize("sections", TOGETHER)
def test_options_have_the_same_bits_on_other_ranks_and_after_a_resume(sections, executor, tmp_path):
    raw = quick_run.settings(
        {"algorithm": {"name": "fedper"}, "runtime": {"executor": executor, "lanes": 2}}, **sections
    )
    digest = quick_run.run(raw, tmp_path / "one")
    quick_run.run(quick_run.settings(raw, training={"rounds": 1}), tmp_path / "three", ranks=3)
    assert quick_run.resume(tmp_path / "three", ("training.rounds=3",), ranks=2) == digest


def test_bf16_keeps_float32_weights_near_those_of_fp32(tmp_path):
    servers = []
    for precision in ("fp32", "bf16"):
        raw = quick_run.settings(algorithm={"name": "fedavg"}, training={"rounds": 2, "precision": precision})
        servers.append(run_folder.read_server(run(raw, tmp_path / precision)[1], 2))
    for path, array in servers[1].items():
        assert array.dtype == np.float32
        # 8 bits of mantissa, some ten steps with learning rate 0.1 on weights of 0.1.
        np.testing.assert_allclose(array, servers[0][path], atol=0.01, err_msg=path)


def test_evaluating_every_second_round_leaves_the_state_as_it_is(tmp_path):
    digest = quick_run.run(quick_run.settings(training={"rounds": 5}), tmp_path / "each")
    second, folder = run(quick_run.settings(training={"rounds": 5}, evaluation={"every": 2}), tmp_path)
    assert second == digest
    rows = metrics_file.read(folder)
    assert [bool(row["accuracy_mean"]) for row in rows] == [False, True, False, True, True]
    full = metrics_file.read(tmp_path / "each")
    for sparse_row, full_row in zip(rows, full, strict=True):
        if sparse_row["accuracy_mean"]:
            assert (sparse_row["accuracy_mean"], sparse_row["accuracy_std"]) == (
                full_row["accuracy_mean"],
                full_row["accuracy_std"],
            )


def test_a_checkpoint_every_second_round_and_after_the_last(tmp_path):
    digest = quick_run.run(quick_run.settings(training={"rounds": 5}), tmp_path / "each")
    second, folder = run(quick_run.settings(training={"rounds": 5}, checkpoint={"every": 2}), tmp_path)
    assert second == digest
    assert run_folder.rounds(folder) == [0, 2, 4, 5]
    assert quick_run.resume(tmp_path / "two", ("training.rounds=6",), ranks=3) == quick_run.resume(
        tmp_path / "each", ("training.rounds=6",)
    )


@pytest.mark.parametrize("absent", ["latest", "last_received"])
def test_an_absent_client_is_tested_with_the_reply_that_is_named(absent, tmp_path):
    raw = quick_run.settings(
        algorithm={"name": "fedavg"},
        training={"rounds": 4, "participation": 0.15},  # one client of seven
        evaluation={"absent": absent},
    )
    _, folder = run(raw, tmp_path)
    metrics = [run_folder.read_metrics(folder, round) for round in range(1, 5)]
    moved = set()
    for before, after in pairwise(metrics):
        away = np.setdiff1d(np.arange(7), after["participants"])
        moved |= set(away[before["correct"][away] != after["correct"][away]].tolist())
    assert bool(moved) == (absent == "latest")
    received = {
        path
        for _, arrays in run_folder.read_clients(folder, 4, np.arange(7)).values()
        for path in arrays
        if path.startswith("received/")
    }
    assert bool(received) == (absent == "last_received")


CASES = every_algorithm()
ONE_OF_EACH = {case["algorithm"]["name"]: name for name, case in reversed(CASES.items())}.values()
REFUSES_STATE = {"pfedme", "fedfcd-full", "scaffold", "fednova"}
ADAM = {"optimizer": "adam", "keep_optimizer": True, "lr": 0.01}


@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_adam_is_kept_between_rounds_or_refused(case, tmp_path):
    training = {**CASES[case]["training"], **ADAM, "rounds": 1, "clip_norm": 1.0}
    raw = quick_run.settings(CASES[case], training=training, evaluation={"every": 9})
    if case in REFUSES_STATE:
        with pytest.raises(UserError, match=r"training.(keep_optimizer|optimizer)"):
            quick_run.run(raw, tmp_path / "run")
        return
    quick_run.run(raw, tmp_path / "run")
    state = conformance.state_of(tmp_path / "run", 1)
    steps = [array for path, array in state.items() if "/optimizer/" in path and path.endswith("/steps")]
    trained = np.isin(np.arange(7), run_folder.read_metrics(tmp_path / "run", 1)["participants"])
    assert steps and all(((count > 0) == trained).all() for count in steps)


@pytest.mark.parametrize("name", ["fedrep", "ditto"])
def test_bits_and_continuation_with_state_that_is_kept(name, tmp_path):
    training = {**ADAM, "decay_by": "participations", "schedule": "cosine", "decay_rounds": 5, "label_smoothing": 0.1}
    runs = Runs({**CASES[name], "training": training}, tmp_path)
    for executor in conformance.EXECUTORS:
        conformance.same_bits(runs, executor, 3)
    conformance.loop_and_lanes_agree(runs, 1e-4)  # Adam divides by the root of a square: rounding grows
    conformance.exact_continuation(runs, "latest", "lanes")


@pytest.mark.parametrize(
    "training, message",
    [
        ({"optimizer": "adam", "momentum": 0.9}, "training.momentum = 0.9 has an effect with training.optimizer: sgd"),
        (
            {"steps": 3, "epochs": 2},
            "training.epochs = 2 has no effect beside training.steps = 3, .*set epochs to 1, or",
        ),
        ({"beta1": 0.5}, "training.beta1 = 0.5 has an effect with training.optimizer: adam or adamw only"),
        ({"keep_optimizer": True}, "training.keep_optimizer = True has an effect with momentum, or"),
        ({"schedule": "cosine", "lr_decay": 0.9}, "training.lr_decay = 0.9 has an effect with .*exponential or step"),
        ({"schedule": "step"}, "needs training.decay_rounds"),
        ({"schedule": "constant", "decay_by": "participations"}, "decay_by = 'participations' has an effect with"),
        ({"bn": "local"}, "training.bn = 'local' has an effect with a model with batch norm only"),
    ],
)
def test_options_without_effect_are_refused(training, message, tmp_path):
    with pytest.raises(UserError, match=message):
        quick_run.run(quick_run.settings(training=training), tmp_path / "run")


@pytest.mark.parametrize("name", ["fedavg", "fedbabu", "fedpac", "fesem", "moon", "scaffold"])
def test_first_models_of_clients_are_refused_where_the_server_sends_all_of_them(name, tmp_path):
    raw = quick_run.settings(algorithm={"name": name}, training={"init": "per_client"})
    with pytest.raises(UserError, match=rf"init = per_client has no effect: .*{ALGORITHMS[name].__name__} begin with"):
        quick_run.run(raw, tmp_path / "run")


NEED = {  # a value of each key that has an effect with some values of another alone
    "apfl": {"alpha_lr": 0.1},
    "fedamp": {"sigma": 2.0, "cosine_scale": 1.0, "self_weight": 0.1},
    "fedfcd": {"alternation": "batch"},
    "fedgmh": {"critical_share": 0.1, "critical_from": "own", "importance": "squared_change", "ranked": "tensor"},
    "pfedafe": {"beta_steps": 2, "beta_lr": 0.2},
    "pfedpm": {"relation_lr": 0.1, "norm_epsilon": 0.1},
    "perfedavg": {"difference": 0.1},
}


def test_a_key_of_an_algorithm_has_an_effect_with_others_or_is_refused():
    kinds = {name: ALGORITHMS[name] for name in NEED}
    assert {name: [*values] for name, values in NEED.items()} == {name: [*kinds[name].needs] for name in NEED}
    assert all(name in NEED or not kind.needs for name, kind in ALGORITHMS.items())
    for name, key, value in ((name, key, value) for name, values in NEED.items() for key, value in values.items()):
        needed_key, *allowed = kinds[name].needs[key]
        hint = get_type_hints(kinds[name])[needed_key]
        for switch in (True, False) if hint is bool else get_args(hint):
            raw = quick_run.settings(algorithm={"name": name, key: value, needed_key: switch})
            if switch in allowed:
                assert getattr(parse(raw).algorithm, key) == value
                continue
            with pytest.raises(UserError, match=rf"algorithm.{key} = .* has an effect with algorithm.{needed_key} = "):
                parse(raw)


def test_more_rounds_would_change_a_cosine_over_all_rounds(tmp_path):
    quick_run.run(quick_run.settings(training={"rounds": 1, "schedule": "cosine"}), tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"training.rounds = 1 in the run, 2 now"):
        quick_run.resume(tmp_path / "run", ("training.rounds=2",))
