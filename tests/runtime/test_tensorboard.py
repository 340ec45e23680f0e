"""`output.tensorboard`: TensorBoard reads what metrics.csv says, each round once, also after a continuation."""

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as Watcher
from tensorboard.util.tensor_util import make_ndarray
from torch.utils.tensorboard import SummaryWriter

import quick_run
from pflmpi.cli import main
from pflmpi.config import load as configuration
from pflmpi.errors import ConfigError, RunError, UserError
from pflmpi.runtime import tensorboard
from pflmpi.store import metrics_file

ON = {"tensorboard": True}

Scalars = dict[str, list[tuple[int, float]]]


def read(run: Path) -> EventAccumulator:
    """All that is in the event files of a run; nothing is thinned out, or left out because it came again."""
    folder = str(run / tensorboard.FOLDER)
    return EventAccumulator(folder, size_guidance={"tensors": 0}, purge_orphaned_data=False).Reload()


def written(run: Path) -> Scalars:
    """The rounds and values of each scalar in the event files of a run; TensorBoard's data server shows no doubles."""
    found = read(run)
    result: Scalars = {}
    for name in found.Tags()["tensors"]:
        values = [(event.step, make_ndarray(event.tensor_proto)) for event in found.Tensors(name)]
        assert all(value.dtype == np.float32 and value.shape == () for _, value in values)
        result[name] = [(step, value.item()) for step, value in values]
    return result


def times(run: Path) -> list[float]:
    """When each round ended."""
    return [event.wall_time for event in read(run).Tensors("seconds")]


def expected(run: Path) -> Scalars:
    """What metrics.csv says, in single precision."""
    result: Scalars = {}
    for line in metrics_file.read(run):
        for name, value in line.items():
            if name != "round" and value:
                result.setdefault(name, []).append((int(line["round"]), float(np.float32(value))))
    return result


def ascending(values: list[float]) -> bool:
    return all(before < after for before, after in pairwise(values))


def own_files(run: Path) -> list[Path]:
    """Those that hold anything."""
    return [path for path in (run / tensorboard.FOLDER).glob("events.out.tfevents.*.pflmpi") if path.stat().st_size]


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_column_of_every_round_is_there_once(tmp_path: Path, ranks: int) -> None:
    run = tmp_path / "run"
    quick_run.run(
        quick_run.settings(output=ON, evaluation={"every": 2, "unseen": 0.2}, training={"rounds": 4}), run, ranks
    )
    found = written(run)
    assert found == expected(run)
    assert set(found) == set(metrics_file.COLUMNS) - {"round"}
    assert list((run / tensorboard.FOLDER).iterdir()) == own_files(run) and len(own_files(run)) == 1, "by one rank"
    assert ascending(times(run))


def test_a_continuation_has_each_round_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    quick_run.run(quick_run.settings(output=ON), run)
    (run / "round_00003.h5").unlink()  # killed before this checkpoint, but after its line
    with SummaryWriter(str(run / tensorboard.FOLDER), filename_suffix=".other") as other:
        other.add_scalar("of another program", 0.5, 7, new_style=True)
    quick_run.resume(run, ("training.rounds=5",))
    found = written(run)
    assert found.pop("of another program") == [(7, 0.5)]
    assert found == expected(run)
    assert [step for step, _ in found["seconds"]] == [1, 2, 3, 4, 5]
    assert ascending(times(run)) and len(own_files(run)) == 1


def test_a_tensorboard_that_is_looking_sees_a_continuation(tmp_path: Path) -> None:
    run = tmp_path / "run"
    quick_run.run(quick_run.settings(output=ON), run)
    watcher = Watcher(str(run / tensorboard.FOLDER)).Reload()
    assert [event.step for event in watcher.Tensors("seconds")] == [1, 2, 3]
    quick_run.resume(run, ("training.rounds=5",))
    assert [event.step for event in watcher.Reload().Tensors("seconds")] == [1, 2, 3, 4, 5]


def test_they_can_be_asked_for_later_and_left_out_later(tmp_path: Path) -> None:
    run = tmp_path / "run"
    before = quick_run.run(quick_run.settings(), run)
    assert not (run / tensorboard.FOLDER).exists()
    quick_run.resume(run, ("training.rounds=4", "output.tensorboard=true"))
    assert written(run) == expected(run)
    quick_run.resume(run, ("training.rounds=5", "output.tensorboard=false"))
    assert [step for step, _ in written(run)["seconds"]] == [1, 2, 3, 4]
    assert before != quick_run.digest(run)


def test_the_results_are_the_same_with_them(tmp_path: Path) -> None:
    without = quick_run.run(quick_run.settings(), tmp_path / "without")
    assert quick_run.run(quick_run.settings(output=ON), tmp_path / "with") == without


def test_times_of_earlier_rounds_are_without_pauses(tmp_path: Path) -> None:
    metrics_file.path(tmp_path).write_text("")
    end = metrics_file.path(tmp_path).stat().st_mtime
    assert tensorboard._times(tmp_path, [5.0, 2.0, 1.0]) == [end - 3, end - 1, end]
    assert tensorboard._times(tmp_path, []) == []


def test_a_missing_library_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match="needs the package tensorboard, which is not installed; `pip install tensorb"):
        quick_run.run(quick_run.settings(output=ON), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_missing_library_is_told_with_two_ranks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match="needs the package tensorboard"):
        quick_run.run(quick_run.settings(output=ON), tmp_path / "run", ranks=2)
    assert not (tmp_path / "run").exists()


def test_a_full_disk_ends_the_run_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SummaryWriter, "add_scalar", full)
    with pytest.raises(RunError, match=r"cannot write .*tensorboard: No space left .* -s output\.tensorboard=false"):
        quick_run.run(quick_run.settings(output=ON), tmp_path / "run")


def test_the_section_is_checked_like_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"output\.tensorboard = 'often'"):
        configuration.parse(quick_run.settings(output={"tensorboard": "often"}))
    with pytest.raises(ConfigError, match="unknown key in output: 'wandb'; known: tensorboard"):
        configuration.parse(quick_run.settings(output={"wandb": True}))
    assert main(["schema"]) == 0
    assert "tensorboard" in capfd.readouterr().out
