"""Runs that a kill left with recorded checkpoints and none in HDF5: whoever reads or continues them recovers these."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import quick_run
from pflmpi.analysis.run import open_run
from pflmpi.cli import main
from pflmpi.cluster.run_status import run_status
from pflmpi.commands.display.start_line import start_line
from pflmpi.config.load import parse
from pflmpi.experiment import run as experiment
from pflmpi.experiment.run import RankContext
from pflmpi.python import processes
from pflmpi.runtime import checkpoints
from pflmpi.runtime.checkpoints import Background
from pflmpi.store import run_folder
from pflmpi.store.pruning import discard_after
from pflmpi.store.records import segments
from pflmpi.sweep.empty_starts import too_many
from pflmpi.sweep.pending import run_state
from pflmpi.transports.inprocess import InProcessTransport

RAW = quick_run.settings(training={"rounds": 2})
ALONE = RankContext(InProcessTransport(), torch.device("cpu"), 2)


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was killed after round 2, before a checkpoint became HDF5."""
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Background, "begin", lambda self: None)
        patch.setattr(Background, "end", lambda self: None)
        patch.setattr(checkpoints, "finish", lambda run, last: None)
        experiment.run(parse(RAW), run, ALONE, lambda progress: None)
    assert run_folder.rounds(run) == [] and segments.recorded(run) == [0, 1, 2]
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """The digest of an undisturbed run of so many rounds."""
    folder = tmp_path_factory.mktemp("whole")
    return lambda rounds: quick_run.run(quick_run.settings(training={"rounds": rounds}), folder / str(rounds))


def test_it_is_read(killed: Path, whole: Callable[[int], str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_status(killed).checkpoint == 2 and run_folder.rounds(killed) == [], "status changes nothing"
    assert main(["inspect", str(killed), "--digest"]) == 0
    assert capsys.readouterr().out.split()[-1] == whole(2)


def test_it_is_opened(killed: Path) -> None:
    assert open_run(killed).rounds[-1] == 2


def test_it_is_continued(killed: Path, whole: Callable[[int], str]) -> None:
    assert quick_run.resume(killed, ("training.rounds=3",)) == whole(3)


def test_the_start_line_says_after_which_round_it_goes_on(killed: Path) -> None:
    assert "goes on after round 2" in start_line(parse(RAW), killed, 1)


def test_run_with_continue_goes_on_from_it(killed: Path) -> None:
    seen: list[int] = []
    config = parse(quick_run.settings(training={"rounds": 4}))
    experiment.run(config, killed, ALONE, lambda progress: seen.append(progress.round), resume="if_there")
    assert seen == [3, 4]


def test_python_is_told_of_the_rounds_after_it(killed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reached(Exception):
        pass

    def rounds(folder: Path, done: int) -> None:
        raise Reached(done)

    monkeypatch.setattr(processes, "NewRounds", rounds)
    with pytest.raises(Reached, match=r"^2$"):
        processes.run(parse(RAW), killed, 2, None, resume=True, quiet=True)


def test_a_sweep_knows_that_it_is_done(killed: Path) -> None:
    state = run_state(killed, parse(RAW))
    assert (state.state, state.done) == ("done", 2)


def test_a_sweep_counts_its_start_as_one_that_brought_rounds(killed: Path) -> None:
    task: Any = SimpleNamespace(cell=SimpleNamespace(run=lambda out: out / "run"), done=0)
    assert not too_many(task, killed.parent)
    assert not list(killed.parent.glob(".*.empty"))


def test_what_was_recorded_after_the_round_to_resume_from_is_deleted(killed: Path) -> None:
    open_run(killed)
    late = segments.folder(killed) / "round_00003_rank_000.rec"
    late.parent.mkdir()
    late.touch()
    discard_after(killed, 2)
    assert not late.exists() and run_folder.rounds(killed)[-1] == 2


def test_records_in_the_folder_of_a_new_run_are_deleted_before_its_first_round(killed: Path) -> None:
    mine = next(segments.folder(killed).glob("*.rec"))
    theirs = mine.with_name("round_00001_rank_001.rec")
    mine.rename(theirs)
    (killed / "config.yaml").unlink()
    seen: list[bool] = []
    experiment.run(parse(RAW), killed, ALONE, lambda progress: seen.append(theirs.exists()))
    assert seen == [False, False]
