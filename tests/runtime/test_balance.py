"""Clients are spread over ranks by the seconds that they were measured to take; results do not depend on it."""

import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quick_run
from every_algorithm import every_algorithm
from pflmpi.messages.groups import ClientGroup
from pflmpi.runtime import client_errors, participants
from pflmpi.runtime.balance.client_seconds import measured, pace, unmeasured
from pflmpi.runtime.placement import Placement
from pflmpi.store import run_folder

CLIENTS, SLOW, ROUNDS = 7, 2, 8
SECONDS = np.array([12.0 if client == SLOW else 1.0 for client in range(CLIENTS)])

Trained = dict[int, dict[int, list[int]]]  # by round and rank, the clients that it trained


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trained]:
    """What each rank trains, by a clock on which each client takes its `SECONDS`."""
    found: Trained = defaultdict(lambda: defaultdict(list))
    here = threading.local()
    update = client_errors.update

    class Clock:
        def lap(self) -> float:
            taken, here.taken = here.taken, 0.0
            return taken

    def timed(executor: Any, clients: ClientGroup, states: Any, down: Any, round: int, skip: bool) -> Any:
        here.taken = float(SECONDS[clients].sum())
        found[round][threading.get_ident()] += clients.tolist()
        return update(executor, clients, states, down, round, skip)

    monkeypatch.setattr(participants, "Stopwatch", Clock)
    monkeypatch.setattr(client_errors, "update", timed)
    return found


def settings(name: str, **runtime: Any) -> dict[str, Any]:
    """Everyone trains in every round, as many steps as everyone else."""
    return quick_run.settings(
        every_algorithm()[name],
        partition={"name": "iid", "clients": CLIENTS},
        training={"rounds": ROUNDS, "participation": 1.0, "steps": 1},
        runtime={"executor": "loop", **runtime},
    )


def waiting(one: dict[int, list[int]]) -> float:
    """Seconds that the ranks wait for the slowest of them, their mean, by the clock of the test."""
    busy = [SECONDS[clients].sum() for clients in one.values()]
    return float(max(busy) - np.mean(busy))


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_slow_client_soon_has_a_rank_of_its_own_and_bits_are_the_same(
    ranks: int, trained: Trained, tmp_path: Path
) -> None:
    alone = quick_run.run(settings("fedavg"), tmp_path / "alone")
    trained.clear()
    assert quick_run.run(settings("fedavg"), tmp_path / "measured", ranks) == alone
    by_time = {round: dict(one) for round, one in trained.items()}
    trained.clear()
    assert quick_run.run(settings("fedavg", balance="samples"), tmp_path / "samples", ranks) == alone
    for round, one in by_time.items():
        assert ([SLOW] in one.values()) == (round > 4), f"round {round}: {one}"
        assert [SLOW] not in trained[round].values()
    assert waiting(by_time[5]) < waiting(by_time[4]) == waiting(trained[5])


def test_a_run_goes_on_with_what_was_measured_before(trained: Trained, tmp_path: Path) -> None:
    whole = quick_run.run(settings("fedavg"), tmp_path / "whole")
    raw = settings("fedavg")
    quick_run.run({**raw, "training": {**raw["training"], "rounds": 4}}, tmp_path / "run", 2)
    trained.clear()
    assert quick_run.resume(tmp_path / "run", (f"training.rounds={ROUNDS}",), 3) == whole
    assert all([SLOW] in one.values() for one in trained.values())
    assert run_folder.read_metrics(tmp_path / "run", ROUNDS)["seconds_clients"].tolist() == [[s] * 3 for s in SECONDS]


def test_the_first_round_of_each_start_is_not_measured(trained: Trained, tmp_path: Path) -> None:
    def num_measures(rounds: int) -> list[int]:
        seconds = run_folder.read_metrics(tmp_path / "run", rounds)["seconds_clients"]
        return np.isfinite(seconds).sum(1).tolist()

    raw = settings("fedavg")
    quick_run.run({**raw, "training": {**raw["training"], "rounds": 2}}, tmp_path / "run", 2)
    assert num_measures(2) == [1] * CLIENTS
    quick_run.resume(tmp_path / "run", ("training.rounds=4",), 2)
    assert num_measures(3) == [1] * CLIENTS and num_measures(4) == [2] * CLIENTS


def test_clients_that_keep_state_move_at_a_continuation_alone(trained: Trained, tmp_path: Path) -> None:
    whole = quick_run.run(settings("fedamp"), tmp_path / "whole")
    raw = settings("fedamp")
    trained.clear()
    quick_run.run({**raw, "training": {**raw["training"], "rounds": 6}}, tmp_path / "run", 2)
    assert not any([SLOW] in one.values() for one in trained.values())
    trained.clear()
    assert quick_run.resume(tmp_path / "run", (f"training.rounds={ROUNDS}",), 2) == whole
    assert list(trained) == [7, 8] and all([SLOW] in one.values() for one in trained.values())
    found = run_folder.read_layout(tmp_path / "run", ROUNDS)
    homes = [{found.files[found.file[client]] for client in each} for each in trained[8].values()]
    assert all(len(files) == 1 for files in homes), "each rank's clients are in its own shard"


def test_a_continuation_may_spread_clients_by_steps_again(trained: Trained, tmp_path: Path) -> None:
    raw = settings("fedavg")
    quick_run.run({**raw, "training": {**raw["training"], "rounds": 4}}, tmp_path / "run", 2)
    trained.clear()
    quick_run.resume(tmp_path / "run", ("training.rounds=5", "runtime.balance=samples"), 2)
    assert [SLOW] not in trained[5].values()


def test_a_client_counts_by_the_median_of_its_measures_from_the_second_on() -> None:
    work, seconds = np.array([10.0, 10.0, 40.0, 0.0]), unmeasured(4)
    for client, taken in ((0, 1e-3), (1, 0.5), (0, 0.9), (0, 2e-3)):  # 0.9 is the machine's other work
        seconds = measured(seconds, np.array([client]), np.array([taken]))
    assert pace(seconds, work).tolist() == [200.0] * 4, "a single measure does not count"
    seconds = measured(seconds, np.array([1]), np.array([4e-3]))
    assert pace(seconds, work).tolist() == [200.0, 400.0, 300.0, 300.0], "of two, the lower"
    assert not pace(unmeasured(4), work).any()


def test_clients_are_moved_for_a_tenth_of_the_time_and_not_for_less() -> None:
    groups = tuple(np.array([client]) for client in range(4))
    placement = Placement(2, groups, 32, None, (0, 1), np.array([4.0, 3.0, 2.0, 1.0]))

    def spread(*pace: float) -> list[list[int]]:
        found = placement.assign(np.arange(4), pace=np.array(pace) if pace else None)
        return [np.concatenate(each).tolist() for each in found]

    usual = [[0, 3], [1, 2]]
    assert spread() == spread(1, 1, 1, 1) == usual
    assert spread(100, 100, 100, 250) == usual, "the slowest rank would have 600 microseconds instead of 650"
    assert spread(100, 100, 100, 400) == [[0, 1], [3, 2]], "700 instead of 800"
