"""What every algorithm must keep: the same bits everywhere, exact continuation, only what was declared travels."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import comparisons
import quick_run
from every_algorithm import MESSAGE_KINDS, every_algorithm
from pflmpi.algorithms import ALGORITHMS
from pflmpi.config import load as configuration
from pflmpi.run.build import prepare
from pflmpi.store import run_folder

CASES = every_algorithm()
KEEPS_REPLY = [name for name, case in CASES.items() if ALGORITHMS[case["algorithm"]["name"]].predicts_with]
EXECUTORS = ("loop", "lanes")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, str]]:
    """The folder and the digest of a case's run; each run is made once."""

    @cache
    def get(case: str, executor: str, ranks: int, server: str = "auto") -> tuple[Path, str]:
        folder = tmp_path_factory.mktemp(case) / "run"
        # Three participants in lanes of two: several groups, and one that is padded.
        raw = quick_run.settings(CASES[case], runtime={"executor": executor, "lanes": 2, "server": server})
        return folder, quick_run.run(raw, folder, ranks)

    return get


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_same_bits_on_any_number_of_ranks(case: str, executor: str, finished: Callable[..., tuple[Path, str]]) -> None:
    alone = finished(case, executor, 1)[1]
    for ranks in (2, 3, 5) if case in MESSAGE_KINDS else (3,):
        assert finished(case, executor, ranks)[1] == alone, f"{ranks} ranks"


@pytest.mark.parametrize("case", MESSAGE_KINDS)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_same_bits_with_a_rank_for_the_server_alone(
    case: str, executor: str, finished: Callable[..., tuple[Path, str]]
) -> None:
    assert finished(case, executor, 5, "dedicated")[1] == finished(case, executor, 1)[1]


def test_every_kind_of_message_is_among_those_on_more_ranks() -> None:
    def kinds(case: str) -> set[object]:
        experiment = prepare(configuration.parse(quick_run.settings(CASES[case])), torch.device("cpu"))
        task, algorithm = experiment.tasks[0], experiment.config.algorithm
        messages = [*algorithm.uplink(task).values(), *algorithm.downlink(task).values()]
        return {*map(type, messages), *(["introduces"] if algorithm.introduces else [])}

    assert set().union(*map(kinds, MESSAGE_KINDS)) == set().union(*map(kinds, CASES))


@pytest.mark.parametrize(
    "case, absent",
    [(name, "last_received" if name in KEEPS_REPLY else "latest") for name in CASES]
    + [(name, "latest") for name in MESSAGE_KINDS if name in KEEPS_REPLY],
)
def test_a_continued_run_has_the_bits_of_an_unbroken_one(case: str, absent: str, tmp_path: Path) -> None:
    raw = quick_run.settings(CASES[case], training={"rounds": 4, "momentum": 0.5}, evaluation={"absent": absent})
    whole = quick_run.run(raw, tmp_path / "whole")
    quick_run.run(quick_run.settings(raw, training={"rounds": 1}), tmp_path / "parts", 3)
    quick_run.resume(tmp_path / "parts", ("training.rounds=3",), ranks=1)
    assert quick_run.resume(tmp_path / "parts", ("training.rounds=4",), ranks=2) == whole
    for name in ("correct", "total", "participants"):
        last = [run_folder.read_metrics(tmp_path / folder, 4)[name] for folder in ("whole", "parts")]
        assert np.array_equal(*last), name


@pytest.mark.parametrize("case", CASES)
def test_loop_and_lanes_agree_within_rounding(case: str, finished: Callable[..., tuple[Path, str]]) -> None:
    # 1e-5: float32 sums in another order, over some twenty steps.
    loop, lanes = (comparisons.state_of(finished(case, executor, 1)[0], 2) for executor in EXECUTORS)
    assert loop.keys() == lanes.keys()
    for path, array in loop.items():
        # Which entries of a client's head are critical may flip between equals.
        if array.dtype != bool or path.startswith("server/"):
            np.testing.assert_allclose(array, lanes[path], atol=1e-5, err_msg=path)


@pytest.mark.parametrize("case", CASES)
def test_counted_bytes_are_the_declared_ones(case: str, finished: Callable[..., tuple[Path, str]]) -> None:
    folder = finished(case, "loop", 3)[0]
    experiment = prepare(configuration.parse(quick_run.settings(CASES[case])), torch.device("cpu"))
    task, kind = experiment.tasks[0], experiment.config.algorithm
    held = (experiment.federation.class_counts > 0).sum(1)
    for round in (1, 2, 3):
        metrics, moved = run_folder.read_metrics(folder, round), run_folder.read_bytes(folder, round)
        for way, messages in (("up", kind.uplink(task)), ("down", kind.downlink(task))):
            each = np.array([sum(one.client_bytes(int(n)) for one in messages.values()) for n in held])
            expected = np.where(np.isin(np.arange(7), metrics["participants"]), each, 0)
            if way == "up" and round == 1 and kind.introduces:
                expected = expected + each
            assert np.array_equal(moved[way], expected), way


def test_another_seed_gives_another_digest(tmp_path: Path) -> None:
    first = quick_run.run(quick_run.settings(), tmp_path / "a")
    assert quick_run.run(quick_run.settings(), tmp_path / "b") == first
    assert quick_run.run(quick_run.settings(seed=4), tmp_path / "c") != first


@pytest.mark.parametrize("name", ["fedgmh-full", "fedfcd-full"])  # fedfcd's clients introduce themselves once
def test_a_run_killed_in_its_first_round_continues(name: str, tmp_path: Path) -> None:
    case = every_algorithm()[name]
    rounds = {count: quick_run.settings(case, training={**case["training"], "rounds": count}) for count in (0, 2)}
    quick_run.run(rounds[0], tmp_path / "killed")
    assert quick_run.resume(tmp_path / "killed", ("training.rounds=2",)) == quick_run.run(rounds[2], tmp_path / "whole")


def test_continuing_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    first = quick_run.run(quick_run.settings(), tmp_path / "a")
    before = (tmp_path / "a" / "metrics.csv").read_text()
    assert quick_run.resume(tmp_path / "a", ranks=2) == first
    assert (tmp_path / "a" / "metrics.csv").read_text() == before


def test_a_run_can_be_moved_and_continued(tmp_path: Path) -> None:
    whole = quick_run.run(quick_run.settings(training={"rounds": 4}), tmp_path / "whole")
    quick_run.run(quick_run.settings(training={"rounds": 2}), tmp_path / "a")
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert quick_run.resume(tmp_path / "b", ("training.rounds=4",)) == whole
