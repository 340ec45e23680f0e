"""A checkpoint holds little of metrics.csv, however many rounds there are, and a damaged one is restored from it."""

import errno
import logging
import os
import re
import shutil
from pathlib import Path

import h5py
import pytest

import quick_run
from pflmpi.analysis.integrity import check
from pflmpi.errors import RunError, UserError
from pflmpi.store import checked_hdf5, run_folder
from pflmpi.store.metrics import history, metrics_file
from pflmpi.store.one_file import writing

ROUNDS = 9
LONGEST = 500  # bytes; a line has about 160


def settings(**sections: object) -> dict[str, object]:
    return quick_run.settings(training={"rounds": ROUNDS}, **sections)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose round files hold no more than four lines."""
    run = tmp_path_factory.mktemp("made") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "LONGEST", LONGEST)
        quick_run.run(settings(checkpoint={"keep": 0}), run, 2)
    return run


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def problems(run: Path) -> list[str]:
    return [problem for each in check(run) for problem in each.problems]


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)


def test_of_many_rounds_a_checkpoint_holds_no_more_lines_than_of_few(tmp_path: Path) -> None:
    metrics_file.restart(tmp_path, 0)
    history.restart(tmp_path, 0)
    recorder, line, most = history.Recorder(tmp_path), ["1"] * len(metrics_file.COLUMNS), 0
    for _ in range(2000):
        recorder.add(metrics_file.append(tmp_path, line))
        recorded, moved = recorder.take()
        most = max(most, len(recorded.lines))
        if moved is not None:
            history.extend(tmp_path, moved)
        assert history.whole(tmp_path, recorded) is not None
    assert most <= history.LONGEST < metrics_file.path(tmp_path).stat().st_size / 10
    text = metrics_file.text(tmp_path)
    metrics_file.path(tmp_path).unlink()
    assert history.whole(tmp_path, recorded) == text


def test_a_file_that_is_deleted_while_it_is_written_begins_anew_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics_file.restart(tmp_path, 0)
    metrics_file.append(tmp_path, ["1"] * len(metrics_file.COLUMNS))
    metrics_file.path(tmp_path).unlink()
    metrics_file.append(tmp_path, ["2"] * len(metrics_file.COLUMNS))
    assert [line["round"] for line in metrics_file.read(tmp_path)] == ["2"]
    assert "metrics.csv was deleted meanwhile; `pflmpi resume` puts it back" in caplog.text


def test_round_files_of_a_run_hold_few_lines_and_with_the_copy_all(made: Path) -> None:
    lines = metrics_file.text(made).splitlines(keepends=True)
    for round in range(ROUNDS + 1):
        recorded = run_folder.read_history(made, round)
        if recorded is not None:
            assert len(recorded.lines) <= LONGEST
            assert history.whole(made, recorded) == b"".join(lines[: round + 1])
    assert 2 < len(history.path(made).read_bytes().splitlines()) < ROUNDS + 1, "a part is copied"
    with h5py.File(made / f"round_{ROUNDS:05d}.h5") as file:
        before = int(file["history"].attrs["bytes_before"])
        assert before + len(file["history"]) == len(b"".join(lines)) and before > LONGEST
    assert problems(made) == []


def test_a_lost_or_damaged_file_is_found_and_restored_from_the_other(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "LONGEST", LONGEST)
        whole = quick_run.run(settings(checkpoint={"keep": 1}), run := tmp_path / "run")
    text, copied = metrics_file.text(run), history.path(run).read_bytes()
    for path, parts in ((metrics_file.path(run), (700, len(text) - 9)), (history.path(run), (700,))):
        for position in parts:
            flip(path, position)
            (problem,) = problems(run)
            assert f"{path} differs from what round {ROUNDS} recorded in line" in problem or "damaged" in problem
            assert quick_run.resume(run, (f"training.rounds={ROUNDS}",)) == whole
            assert metrics_file.text(run) == text and problems(run) == []
        path.unlink()
        assert any(str(path) in problem for problem in problems(run))
        quick_run.resume(run, (f"training.rounds={ROUNDS}",))
        assert metrics_file.text(run) == text and history.path(run).read_bytes().startswith(copied)


def test_where_both_are_damaged_nothing_continues_from_their_lines(run: Path) -> None:
    for path in (metrics_file.path(run), history.path(run)):
        flip(path, 700)
    damaged = metrics_file.text(run)
    lost = f"neither {metrics_file.path(run)} nor its copy {history.path(run)} is as round {ROUNDS} recorded it"
    found = problems(run)
    assert [path for path in (metrics_file.path(run), history.path(run)) if f"{path} differs from" in "".join(found)]
    assert len(found) == 2 and all("; put it back from a copy" in problem for problem in found)
    with pytest.raises(UserError, match=re.escape(f"{lost}; put one of them back")):
        quick_run.resume(run, (f"training.rounds={ROUNDS + 1}",))
    assert metrics_file.text(run) == damaged


def test_a_continuation_from_an_older_round_goes_on_with_its_lines(run: Path) -> None:
    text = metrics_file.text(run)
    for later in range(6, ROUNDS + 1):
        (run / f"round_{later:05d}.h5").unlink()
    metrics_file.path(run).unlink()
    quick_run.resume(run, (f"training.rounds={ROUNDS}",), 3)
    fixed = len(metrics_file.COLUMNS[: metrics_file.COLUMNS.index("wire_up_bytes")])  # which ranks do not change

    def head(each: bytes) -> list[list[bytes]]:
        return [line.split(b",")[:fixed] for line in each.splitlines()]

    assert metrics_file.text(run).splitlines()[:6] == text.splitlines()[:6]
    assert head(metrics_file.text(run)) == head(text)
    assert problems(run) == []


def test_an_exported_file_holds_all_lines(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    def exported() -> bytes:
        writing.write(one := run.parent / "one.h5", run, ROUNDS, False, lambda done, total: None)
        with h5py.File(one) as file:
            return bytes(file["history"][()])

    text = metrics_file.text(run)
    metrics_file.path(run).unlink()
    assert exported() == text
    history.path(run).unlink()
    with caplog.at_level(logging.WARNING):
        assert exported() == b"\n"
    assert "`history` of the file is empty" in caplog.text


def test_a_run_of_format_3_whose_files_hold_all_lines_is_restored(run: Path) -> None:
    text, newest = metrics_file.text(run), run / f"round_{ROUNDS:05d}.h5"

    def fill(target: h5py.File) -> None:
        with h5py.File(newest) as source:
            for name in source:
                if name != "history":
                    source.copy(name, target)
            for name, value in source.attrs.items():
                target.attrs[name] = value
        target.attrs["format_version"] = 3
        checked_hdf5.put(target, "history", history.np.frombuffer(text, "u1"))

    checked_hdf5.write(run / "other", fill)
    (run / "other").replace(newest)
    for path in (metrics_file.path(run), history.path(run)):
        path.unlink()
    assert len(problems(run)) == 1 and "metrics.csv is missing" in problems(run)[0]
    quick_run.resume(run, (f"training.rounds={ROUNDS + 1}",))
    assert metrics_file.text(run).startswith(text) and problems(run) == []


def test_a_copy_that_cannot_be_written_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "LONGEST", LONGEST)
    flushed = os.fdatasync

    def flush(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("metrics.csv"):
            raise OSError(errno.ENOSPC, "No space left on device")
        flushed(descriptor)

    monkeypatch.setattr(os, "fdatasync", flush)
    with pytest.raises(RunError, match=r"No space left .*shards/metrics.csv; the last complete round is \d; free"):
        quick_run.run(settings(), tmp_path / "run")
