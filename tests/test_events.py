"""`output.tensorboard`: the event files say what metrics.csv says, each round once, also after a continuation.

The library that writes them is optional; a recorder takes its place here.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness
import pytest

from pflmpi import config as configuration
from pflmpi.cli import main
from pflmpi.errors import ConfigError, RunError, UserError
from pflmpi.runtime import events
from pflmpi.store import metrics_file

ON = {"tensorboard": True}


class Recorder:
    """Writes a line of JSON for each scalar, into a file named as event files are."""

    made = 0

    def __init__(self, folder: str, purge_step: int, flush_secs: int, filename_suffix: str) -> None:
        Path(folder).mkdir(exist_ok=True)
        Recorder.made += 1
        assert purge_step == 0 and flush_secs > 0
        self._file = (Path(folder) / f"events.out.tfevents.{Recorder.made}{filename_suffix}").open("x")

    def add_scalar(
        self, name: str, value: float, step: int, at: float, new_style: bool, double_precision: bool
    ) -> None:
        assert new_style and double_precision
        self._file.write(json.dumps([name, value, step, at]) + "\n")

    def close(self) -> None:
        self._file.close()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Recorder))


def written(run: Path) -> list[list[Any]]:
    """All that is in the event files of a run, in the order of their names."""
    files = sorted((run / events.FOLDER).glob("events.out.tfevents.*.pflmpi"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def expected(run: Path) -> list[list[Any]]:
    """What metrics.csv says."""
    return [
        [name, float(value), int(line["round"])]
        for line in metrics_file.read(run)
        for name, value in line.items()
        if name != "round" and value
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_column_of_every_round_is_there_once(recorder: None, tmp_path: Path, ranks: int) -> None:
    raw = harness.settings(output=ON, evaluation={"every": 2}, training={"rounds": 4})
    harness.run(raw, tmp_path / "run", ranks)
    found = written(tmp_path / "run")
    assert [one[:3] for one in found] == expected(tmp_path / "run")
    names = {name for name, *_ in found}
    assert names == set(metrics_file.COLUMNS) - {"round"}
    assert len(list((tmp_path / "run" / events.FOLDER).iterdir())) == 1, "by one rank"
    times = [at for *_, at in found]
    assert times == sorted(times)


def test_a_continuation_has_each_round_once(recorder: None, tmp_path: Path) -> None:
    run = tmp_path / "run"
    harness.run(harness.settings(output=ON), run)
    (run / "round_00003.h5").unlink()  # killed before this checkpoint, but after its line
    (run / events.FOLDER / "events.out.tfevents.1.other").write_text("of another program")
    harness.resume(run, ("training.rounds=5",))
    found = written(run)
    assert [one[:3] for one in found] == expected(run)
    assert {step for _, _, step, _ in found} == {1, 2, 3, 4, 5}
    times = [at for *_, at in found]
    assert times == sorted(times)
    assert (run / events.FOLDER / "events.out.tfevents.1.other").exists()


def test_they_can_be_asked_for_later_and_left_out_later(recorder: None, tmp_path: Path) -> None:
    run = tmp_path / "run"
    before = harness.run(harness.settings(), run)
    assert not (run / events.FOLDER).exists()
    harness.resume(run, ("training.rounds=4", "output.tensorboard=true"))
    assert [one[:3] for one in written(run)] == expected(run)
    harness.resume(run, ("training.rounds=5", "output.tensorboard=false"))
    assert {step for _, _, step, _ in written(run)} == {1, 2, 3, 4}
    assert before != harness.digest(run)


def test_the_results_are_the_same_with_them(recorder: None, tmp_path: Path) -> None:
    without = harness.run(harness.settings(), tmp_path / "without")
    assert harness.run(harness.settings(output=ON), tmp_path / "with") == without


def test_times_of_earlier_rounds_are_without_pauses(tmp_path: Path) -> None:
    metrics_file.path(tmp_path).write_text("")
    end = metrics_file.path(tmp_path).stat().st_mtime
    assert events._times(tmp_path, [5.0, 2.0, 1.0]) == [end - 3, end - 1, end]
    assert events._times(tmp_path, []) == []


def test_a_missing_library_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match="needs the package tensorboard, which is not installed; `pip install tensorb"):
        harness.run(harness.settings(output=ON), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_missing_library_is_told_with_two_ranks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match="needs the package tensorboard"):
        harness.run(harness.settings(output=ON), tmp_path / "run", ranks=2)
    assert not (tmp_path / "run").exists()


def test_a_full_disk_ends_the_run_with_what_to_do(
    recorder: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Recorder, "add_scalar", full)
    with pytest.raises(RunError, match=r"cannot write .*tensorboard: No space left .* -s output\.tensorboard=false"):
        harness.run(harness.settings(output=ON), tmp_path / "run")


def test_the_section_is_checked_like_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"output\.tensorboard = 'often'"):
        configuration.parse(harness.settings(output={"tensorboard": "often"}))
    with pytest.raises(ConfigError, match="unknown key in output: 'wandb'; known: tensorboard"):
        configuration.parse(harness.settings(output={"wandb": True}))
    assert main(["schema"]) == 0
    assert "tensorboard" in capfd.readouterr().out
