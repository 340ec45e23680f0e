"""A run that a process writes cannot be written by another; the lock of a process that is gone holds up nobody."""

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import quick_run
from pflmpi.errors import CheckpointError, ConfigError, RunError, UserError
from pflmpi.store import events_file, metrics_file, run_folder, run_lock

HOLD = "import sys, time; from pathlib import Path; from pflmpi.store.run_lock import take\n"
HOLD += "take(Path(sys.argv[1]), {}, False); print('held', flush=True); time.sleep(60)"


@pytest.fixture
def other(tmp_path):
    """A process that holds the lock of `tmp_path`."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


@contextlib.contextmanager
def held(run, jobs, take_over):
    lock = run_lock.take(run, jobs, take_over)
    try:
        yield lock
    finally:
        lock.release()


def take(run, jobs=None, take_over=False):
    with held(run, jobs or {}, take_over) as lock:
        lock.check()


def rewrite(run, **changes):
    """Change what the lock says."""
    path = run_lock.path(run)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_second_process_is_refused_by_name_until_the_first_is_killed(other, tmp_path, caplog):
    with pytest.raises(CheckpointError, match=rf"written by process {other.pid} on .* since .*--take-over"):
        take(tmp_path)
    owner = run_lock.find_owner(tmp_path)
    assert owner is not None and owner.process == other.pid
    other.kill()
    other.wait()
    assert run_lock.find_owner(tmp_path) is None
    take(tmp_path)
    assert f"process {other.pid}" in caplog.text and "that process has ended" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_number_that_a_new_process_has_now_is_not_the_owner(other, tmp_path):
    rewrite(tmp_path, started=1)
    take(tmp_path)


def test_an_owner_elsewhere_is_waited_for_and_gone_once_silent(other, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(run_lock, "SILENCE", 30.0)
    rewrite(tmp_path, host="node7", system="elsewhere")

    def touch():
        time.sleep(0.2)
        os.utime(run_lock.path(tmp_path))

    toucher = threading.Thread(target=touch)
    toucher.start()
    with pytest.raises(CheckpointError, match=r"on node7 .*last heard of"):
        take(tmp_path)
    toucher.join()
    monkeypatch.setattr(run_lock, "SILENCE", 0.5)
    take(tmp_path)
    assert "nothing was heard of it for 0 s" in caplog.text or "nothing was heard of it for 1 s" in caplog.text


def test_an_owner_elsewhere_long_silent_is_not_waited_for(other, tmp_path):
    rewrite(tmp_path, host="node7", system="elsewhere")
    os.utime(run_lock.path(tmp_path), (0, time.time() - 2 * run_lock.SILENCE))
    took = time.monotonic()
    take(tmp_path)
    assert time.monotonic() - took < run_lock.SILENCE / 2


def test_the_same_job_restarted_is_its_own_predecessor(other, tmp_path):
    rewrite(tmp_path, host="node7", system="elsewhere", jobs={"Slurm job 7": 0})
    with pytest.raises(CheckpointError, match="Slurm job 7"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_lock, "_wait_for_owner", lambda run, owner, me, draft: owner.why_gone(run, me.jobs))
        take(tmp_path, {"Slurm job 7": 0})
    take(tmp_path, {"Slurm job 7": 1})


def test_a_copied_folder_is_not_locked(other, tmp_path):
    copy = shutil.copytree(tmp_path, tmp_path / "copy")
    assert run_lock.path(copy).exists() and run_lock.find_owner(copy) is None
    take(copy)


def test_the_lock_goes_with_its_owner_also_after_an_error_and_an_empty_folder_with_it(tmp_path):
    with pytest.raises(ZeroDivisionError), held(tmp_path / "run", {}, False):
        assert run_lock.path(tmp_path / "run").exists()
        _ = 1 / 0
    assert not (tmp_path / "run").exists()


def test_whoever_lost_the_lock_is_told_by_whom(tmp_path):
    with held(tmp_path, {}, False) as lock:
        with held(tmp_path, {}, True) as winner:
            winner.check()
            with pytest.raises(RunError, match=rf"taken over by process {os.getpid()}"):
                lock.check()
        with pytest.raises(RunError, match=r"no lock.json any more"):
            lock.check()
        shutil.rmtree(tmp_path)
        with pytest.raises(RunError, match="moved or deleted"):
            lock.check()


def test_a_damaged_lock_is_that_of_an_unknown_process(other, tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "SILENCE", 0.0)
    content = run_lock.path(tmp_path).read_bytes()
    monkeypatch.setattr(run_lock, "_SETTLED", 0.0)
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        run_lock.path(tmp_path).write_bytes(damaged)
        try:
            take(tmp_path)
        except CheckpointError as error:
            assert "is being written by" in str(error)


@pytest.mark.parametrize("text", ["[" * 100_000, "3", '{"token": "x"}'], ids=range(3))
def test_what_is_no_lock_names_no_owner(text, tmp_path):
    run_lock.path(tmp_path).write_text(text)
    assert run_lock.find_owner(tmp_path) is None and run_lock.read_token(run_lock.path(tmp_path)) is None


@pytest.mark.parametrize("text", ["[" * 100_000 + "\n", "3\n", "", '{"event": "end"}\n'], ids=range(4))
def test_what_is_no_event_says_of_no_end(text, tmp_path):
    events_file.path(tmp_path).write_text(text)
    assert events_file.exit_code(tmp_path) is None


def test_a_file_system_without_hard_links_will_do(other, tmp_path, monkeypatch):
    def link(*_):
        raise PermissionError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(CheckpointError, match="is being written"):
        take(tmp_path)
    take(tmp_path / "new")


def test_a_run_that_is_written_is_neither_resumed_nor_started_again(tmp_path):
    run = tmp_path / "run"
    quick_run.run(quick_run.settings(), run)
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    with held(run, {}, False):
        for again in (lambda: quick_run.resume(run, ranks=2), lambda: quick_run.run(quick_run.settings(), run)):
            with pytest.raises(UserError, match="is being written by process"):
                again()
    assert before == {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_was_taken_over_ends_and_writes_nothing_more(ranks, tmp_path, monkeypatch):
    run, append, other = tmp_path / "run", metrics_file.append, contextlib.ExitStack()

    def then_take_over(folder, *line):
        written = append(folder, *line)
        other.enter_context(held(folder, {}, True))
        return written

    monkeypatch.setattr(metrics_file, "append", then_take_over)
    with other, pytest.raises(RunError, match="was taken over by process"):
        quick_run.run(quick_run.settings(), run, ranks)
    assert [line["round"] for line in metrics_file.read(run)] == ["1"]
    monkeypatch.undo()
    if run_folder.rounds(run):  # two ranks may not have joined the first one yet
        assert quick_run.resume(run) == quick_run.run(quick_run.settings(), tmp_path / "whole")


def test_a_full_disk_names_its_cure_and_leaves_no_half_a_lock(tmp_path, monkeypatch):
    def half(path, text):
        with path.open("w") as file:
            file.write("{")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(ConfigError, match="No space left on device; free space, or choose another folder"):
        run_lock.take(tmp_path, {}, take_over=False)
    assert not list(tmp_path.iterdir())
