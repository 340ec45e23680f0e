"""The thread that writes: in order, bounded, and its errors are not lost."""

import errno
import os
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from pflmpi.errors import CheckpointError, RunError
from pflmpi.store import verify
from pflmpi.store.names import shard_path
from pflmpi.store.shard import write_shard
from pflmpi.store.writer import Writer
from project import ROOT
from store_world import World


def test_the_writer_does_its_jobs_in_order_and_never_has_more_than_two_waiting():
    writer, gate, started, done = Writer("run"), threading.Event(), threading.Event(), []

    def first() -> None:
        started.set()
        gate.wait()
        done.append(0)

    writer.submit(first)
    assert started.wait(10)
    writer.submit(lambda: done.append(1))
    writer.submit(lambda: done.append(2))
    blocked = threading.Thread(target=lambda: writer.submit(lambda: done.append(3)))
    blocked.start()
    blocked.join(0.2)
    assert blocked.is_alive() and done == []
    gate.set()
    blocked.join(10)
    assert not blocked.is_alive()
    writer.flush()
    assert done == [0, 1, 2, 3]
    writer.check()
    writer.close()


def test_an_error_of_the_writer_names_the_file_the_last_round_and_the_way_out(tmp_path):
    world = World(tmp_path / "run", [0, 1, 0], 0)
    world.save(0, ranks=1)
    world.save(1, ranks=1)
    writer, ran = Writer(str(world.run)), []
    path = shard_path(world.run, 2, 0)

    def full(descriptor: int, content: Any, position: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    gate = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        writer.submit(lambda: gate.wait() and write_shard(path, world.flat(np.array([0]))))
        writer.submit(lambda: ran.append("round file"))
        gate.set()
        for ask in (writer.flush, writer.check, lambda: writer.submit(lambda: None), writer.close):
            with pytest.raises(RunError) as caught:
                ask()
    assert str(caught.value) == (
        f"No space left on device while writing {path}; the last complete round is 1; "
        f"free space and `pflmpi resume {world.run}`"
    )
    assert ran == []
    writer.abandon()
    assert verify.find_newest_good(world.run) == (1, [])


def test_any_error_of_a_job_reaches_the_main_thread():
    for raised, expected, words in (
        (ValueError("odd"), RunError, "writing a checkpoint of run failed: ValueError: odd"),
        (CheckpointError("torn"), CheckpointError, "torn"),
        (KeyboardInterrupt(), RunError, "KeyboardInterrupt"),
    ):
        writer = Writer("run")

        def job(error: BaseException = raised) -> None:
            raise error

        writer.submit(job)
        with pytest.raises(expected, match=words):
            writer.close()


def test_a_blocked_submit_raises_an_earlier_error():
    writer, gate = Writer("run"), threading.Event()

    def job() -> None:
        gate.wait()
        raise ValueError

    writer.submit(job)
    writer.submit(lambda: None)
    writer.submit(lambda: None)
    threading.Timer(0.1, gate.set).start()
    with pytest.raises(RunError, match="ValueError"):
        writer.submit(lambda: None)
    writer.abandon()


def test_abandoning_finishes_the_running_job_and_drops_the_others():
    writer, gate, started, done = Writer("run"), threading.Event(), threading.Event(), []

    def first() -> None:
        started.set()
        gate.wait()
        done.append(0)

    writer.submit(first)
    writer.submit(lambda: done.append(1))
    assert started.wait(10)
    threading.Timer(0.1, gate.set).start()
    writer.abandon()
    assert done == [0]
    with pytest.raises(RuntimeError, match="shutdown"):
        writer.submit(lambda: None)


@pytest.mark.parametrize(("ending", "code"), [("", 0), ("raise SystemExit(3)", 3), ("raise ValueError", 1)])
def test_the_end_of_the_program_waits_for_submitted_jobs(tmp_path, ending, code):
    program = f"""
import pathlib, time
from pflmpi.store.writer import Writer
writer = Writer("run")
for name in "ab":
    writer.submit(lambda name=name: (time.sleep(0.2), pathlib.Path(name).touch()))
{ending}
"""
    root = str(ROOT)
    command, environment = [sys.executable, "-c", program], {**os.environ, "PYTHONPATH": root}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, timeout=60, capture_output=True)
    assert ended.returncode == code
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
