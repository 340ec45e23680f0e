"""Every option of training, evaluation and checkpoints does what it says, on one rank and on two."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import quick_run
from both_ways import run
from pflmpi.store import metrics_file, run_folder

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
    each = quick_run.run(quick_run.settings(training={"rounds": 5}), tmp_path / "each")
    second, folder = run(quick_run.settings(training={"rounds": 5}, evaluation={"every": 2}), tmp_path)
    assert second == each
    rows = metrics_file.read(folder)
    assert [bool(row["accuracy_mean"]) for row in rows] == [False, True, False, True, True]
    full = metrics_file.read(tmp_path / "each")
    for here, there in zip(rows, full, strict=True):
        if here["accuracy_mean"]:
            assert (here["accuracy_mean"], here["accuracy_std"]) == (there["accuracy_mean"], there["accuracy_std"])


def test_a_checkpoint_every_second_round_and_after_the_last(tmp_path):
    each = quick_run.run(quick_run.settings(training={"rounds": 5}), tmp_path / "each")
    second, folder = run(quick_run.settings(training={"rounds": 5}, checkpoint={"every": 2}), tmp_path)
    assert second == each
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
