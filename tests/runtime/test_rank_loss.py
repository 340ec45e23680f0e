"""A rank dies before any of its calls, from the first step of the start to the last: the others reach the same bits."""

import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import quick_run
from mortal_transport import Died, MortalTransport, run_mortal
from pflmpi.config import load as configuration
from pflmpi.experiment import build
from pflmpi.experiment import start as starting
from pflmpi.experiment.execute import RankContext
from pflmpi.messages import leaf_owners
from pflmpi.messages.folding import routes
from pflmpi.runtime.progress import Progress
from pflmpi.runtime.setup import Setup
from pflmpi.store import run_folder
from pflmpi.store.lock import taking
from pflmpi.store.lock.run_lock import RunLock
from pflmpi.store.metrics import metrics_file

RANKS = 3
RAW = quick_run.settings(training={"rounds": 2, "momentum": 0.5}, checkpoint={"every": 2})


@pytest.fixture(autouse=True)
def dying_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that dies leaves its lock behind, as a process does; that its process lives is not held against it."""
    release = RunLock.release

    def unless_dying(self: RunLock) -> None:
        if not isinstance(sys.exc_info()[1], Died):
            release(self)

    def take(run: Path, jobs: Mapping[str, int], take_over: bool) -> RunLock:
        return taking.take(run, jobs, take_over=True)

    monkeypatch.setattr(RunLock, "release", unless_dying)
    monkeypatch.setattr(starting, "take", take)


def run(folder: Path, last: dict[int, int], raw: dict[str, Any] = RAW) -> list[MortalTransport]:
    """Run on threads of which some die; only ranks that are 0 at the time may observe rounds."""
    config = configuration.parse(raw)
    torch.set_num_threads(1)

    def work(transport: MortalTransport) -> None:
        def observe(progress: Progress) -> None:
            assert transport.rank == 0

        starting.start(config, folder, RankContext(transport, torch.device("cpu"), RANKS), observe)

    return run_mortal(RANKS, work, last)[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[int]]:
    """The digest of the undisturbed run, and how many calls each rank makes in it."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    transports = run(folder, {})
    return quick_run.digest(folder), [transport.made for transport in transports]


def check(folder: Path, last: dict[int, int], expected: str) -> None:
    run(folder, last)
    assert quick_run.digest(folder) == expected, f"deaths before calls {last}"
    assert run_folder.verify(folder, 2) == []
    assert [row["round"] for row in metrics_file.read(folder)] == ["1", "2"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.6, 0.97])
def test_the_others_go_on_to_the_same_bits(
    share: float, rank: int, whole: tuple[str, list[int]], tmp_path: Path
) -> None:
    expected, calls = whole
    check(tmp_path / "run", {rank: int(share * calls[rank])}, expected)


def test_what_more_ranks_needed_goes_before_fewer_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples on the device, above all."""
    calls, made = run(tmp_path / "whole", {})[0].made, build.setup
    before: dict[int, weakref.ref[Setup]] = {}
    gone: list[bool] = []

    def noted(*args: Any) -> Setup:
        here = threading.get_ident()
        if here in before:
            gone.append(before[here]() is None)
        ready = made(*args)
        before[here] = weakref.ref(ready)
        return ready

    monkeypatch.setattr(build, "setup", noted)
    run(tmp_path / "run", {0: calls // 2})
    assert gone == [True] * (RANKS - 1)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("participation", [0.4, 1.0])  # each rank sends its participant's entries, or sums
def test_a_death_in_a_fold_in_slices(
    participation: float, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it has sent the others their slices, and before it hands over its own."""
    monkeypatch.setattr(routes, "_GATHERED", 0)
    monkeypatch.setattr(routes, "_LEAST_SLICE", 4)
    raw = quick_run.settings(RAW, algorithm={"name": "fedavg"}, training={"participation": participation})
    exchanges = noted_exchanges(tmp_path / "whole", rank, raw, monkeypatch)
    assert len(exchanges) == 2, "one in each round"
    for last in (exchanges[0], exchanges[1] + 1):
        run(tmp_path / str(last), {rank: last}, raw)
        assert quick_run.digest(tmp_path / str(last)) == quick_run.digest(tmp_path / "whole")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_death_while_models_are_compared_and_mixed(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the lost rank kept for its clients, and the leaves that it owned, the others have from the checkpoint."""
    monkeypatch.setattr(leaf_owners, "_LEAST", 1)
    raw = quick_run.settings(RAW, algorithm={"name": "fedamp", "alpha": 0.5, "sigma": 2.0}, checkpoint={"every": 1})
    exchanges = noted_exchanges(tmp_path / "whole", rank, raw, monkeypatch)
    assert len(exchanges) == 4, "the models and the answers of each round"
    for last in (exchanges[1], exchanges[2] + 1, exchanges[3] + 1):
        run(tmp_path / str(last), {rank: last}, raw)
        assert quick_run.digest(tmp_path / str(last)) == quick_run.digest(tmp_path / "whole")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_death_while_models_go_from_client_to_client(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models that live on the lost rank the others have from the checkpoint, as other state of clients."""
    algorithm = {"name": "fedfomo", "received_models": 6}
    raw = quick_run.settings(RAW, algorithm=algorithm, training={"participation": 1.0}, checkpoint={"every": 1})
    exchanges = noted_exchanges(tmp_path / "whole", rank, raw, monkeypatch)
    assert len(exchanges) == 1, "of the models of round 1, for round 2"
    for last in (exchanges[0], exchanges[0] + 1):
        run(tmp_path / str(last), {rank: last}, raw)
        assert quick_run.digest(tmp_path / str(last)) == quick_run.digest(tmp_path / "whole")


def noted_exchanges(folder: Path, rank: int, raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of a rank's all-to-all calls in a run."""
    exchanges = []

    def noting(self: MortalTransport, sent: dict[int, np.ndarray], received: dict[int, np.ndarray]) -> None:
        if self.rank == rank:
            exchanges.append(self.made)
        self._exchange("all-to-all", sent, received)

    with monkeypatch.context() as watched:
        watched.setattr(MortalTransport, "_all_to_all", noting)
        run(folder, {}, raw)
    return exchanges


def test_two_of_three_die_one_after_the_other(whole: tuple[str, list[int]], tmp_path: Path) -> None:
    expected, calls = whole
    check(tmp_path / "run", {0: calls[0] // 2, 1: calls[1] // 2 + 9}, expected)


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(RANKS))
def test_before_every_call(rank: int, whole: tuple[str, list[int]], tmp_path: Path) -> None:
    expected, calls = whole
    for last in range(calls[rank]):
        check(tmp_path / str(last), {rank: last}, expected)


@pytest.mark.slow
def test_two_at_any_two_moments(whole: tuple[str, list[int]], tmp_path: Path) -> None:
    expected, calls = whole
    for first in range(0, calls[0], 5):
        for second in range(first, calls[1] + 30, 7):
            check(tmp_path / f"{first} {second}", {0: first, 1: second}, expected)
