"""What every algorithm must keep: the same bits everywhere, exact continuation, only what was declared travels."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import quick_run
from every_algorithm import MESSAGE_KINDS, every_algorithm
from pflmpi.algorithms import ALGORITHMS
from pflmpi.testing import conformance
from pflmpi.testing.conformance import EXECUTORS, Runs

CASES = every_algorithm()
KEEPS_REPLY = [name for name, case in CASES.items() if ALGORITHMS[case["algorithm"]["name"]].predicts_with]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Runs]:
    """The runs of a case; each is made once."""
    return cache(lambda case: Runs(CASES[case], tmp_path_factory.mktemp(case)))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_same_bits_on_any_number_of_ranks(case: str, executor: str, runs: Callable[[str], Runs]) -> None:
    for ranks in (2, 3, 5) if case in MESSAGE_KINDS else (3,):
        conformance.same_bits(runs(case), executor, ranks)


@pytest.mark.parametrize("case", MESSAGE_KINDS)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_same_bits_with_a_rank_for_the_server_alone(case: str, executor: str, runs: Callable[[str], Runs]) -> None:
    conformance.same_bits(runs(case), executor, 5, "dedicated")


def test_every_kind_of_message_is_among_those_on_more_ranks(runs: Callable[[str], Runs]) -> None:
    def kinds(case: str) -> set[object]:
        experiment = runs(case).experiment()
        task, algorithm = experiment.tasks[0], experiment.config.algorithm
        messages = [*algorithm.uplink(task).values(), *algorithm.downlink(task).values()]
        return {*map(type, messages), *(["introduces"] if algorithm.introduces else [])}

    assert set().union(*map(kinds, MESSAGE_KINDS)) == set().union(*map(kinds, CASES))


@pytest.mark.parametrize(
    "case, absent",
    [(name, "last_received" if name in KEEPS_REPLY else "latest") for name in CASES]
    + [(name, "latest") for name in MESSAGE_KINDS if name in KEEPS_REPLY],
)
def test_a_continued_run_has_the_bits_of_an_unbroken_one(case: str, absent: str, runs: Callable[[str], Runs]) -> None:
    conformance.exact_continuation(runs(case), absent)


@pytest.mark.parametrize("case", CASES)
def test_loop_and_lanes_agree_within_rounding(case: str, runs: Callable[[str], Runs]) -> None:
    conformance.loop_and_lanes_agree(runs(case))


@pytest.mark.parametrize("case", CASES)
def test_newcomers_are_the_same_in_loop_and_lanes(case: str, runs: Callable[[str], Runs]) -> None:
    conformance.newcomers_agree(runs(case))


@pytest.mark.parametrize("case", CASES)
def test_counted_bytes_are_the_declared_ones(case: str, runs: Callable[[str], Runs]) -> None:
    conformance.declared_bytes(runs(case))


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
