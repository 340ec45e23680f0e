"""A thread that writes while the rank computes."""

import atexit
import contextlib
import errno
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from pflmpi.errors import PflmpiError, RunError
from pflmpi.store.names import rounds

_MOST_WAITING = 2
_FULL = {errno.ENOSPC, errno.EDQUOT}


class Writer:
    """Runs jobs one after the other in a thread of its own, at most two waiting.

    After an error no later job is run: a round file must not follow a shard that is not there. The error is raised by
    the next call of `submit`, `check`, `flush` or `close`, and by every later one. At a normal end of the program the
    jobs that were handed over are finished, also without `close`.

    Args:
        run: the folder of the run, for the message of an error.
    """

    def __init__(self, run: str | Path) -> None:
        self._run = Path(run)
        self._waiting: deque[Callable[[], None]] = deque()
        self._running = False
        self._closed = False
        self._done = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        # A daemon, so that a program that fails never waits for a thread that waits for jobs; `atexit` sees to it that
        # it is not stopped half-way.
        self._thread = threading.Thread(target=self._work, name="checkpoint writer", daemon=True)
        self._thread.start()
        atexit.register(self._finish)

    def submit(self, job: Callable[[], None]) -> None:
        """Hand over a job; wait while two others are waiting.

        Raises:
            RunError: an earlier job failed; this one is dropped.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < _MOST_WAITING or self._error is not None)
            self._raise()
            assert not self._closed, "the writer is closed"
            self._waiting.append(job)
            self._changed.notify_all()

    @property
    def done_upto(self) -> int:
        """How many jobs are done; they are done in the order in which they were handed over."""
        return self._done

    def check(self) -> None:
        """Raise what went wrong in an earlier job.

        Raises:
            RunError: it could not be written; names the file, the last complete round, and what to do.
        """
        with self._changed:
            self._raise()

    def flush(self) -> None:
        """Wait until all jobs are done; raises as `check` does."""
        with self._changed:
            self._changed.wait_for(self._idle)
            self._raise()

    def close(self, wait: bool = True) -> None:
        """End the thread after the jobs handed over; raises as `check` does.

        Args:
            wait: False drops the jobs that have not begun, without waiting for the one that has.
        """
        with self._changed:
            if not wait:
                self._waiting.clear()
            self._closed = True
            self._changed.notify_all()
        if wait:
            self._finish()
            atexit.unregister(self._finish)
        self.check()

    def abandon(self) -> None:
        """End the thread after the job that is running, drop those that have not begun; never raises."""
        with contextlib.suppress(PflmpiError):
            self.close(wait=False)
        self._finish()
        atexit.unregister(self._finish)

    def _finish(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _idle(self) -> bool:
        return self._error is not None or not (self._waiting or self._running)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                job = self._waiting.popleft()
                self._running = True
                self._changed.notify_all()
            error = _run(job)
            del job  # and the arrays that it holds
            with self._changed:
                self._running = False
                self._error = error
                if error is None:
                    self._done += 1
                else:
                    self._waiting.clear()
                self._changed.notify_all()
            if error is not None:
                return

    def _raise(self) -> None:
        error = self._error
        if error is None:
            return
        if isinstance(error, PflmpiError):
            raise error
        if isinstance(error, OSError):
            raise RunError(self._explain(error)) from error
        raise RunError(f"writing a checkpoint of {self._run} failed: {type(error).__name__}: {error}") from error

    def _explain(self, error: OSError) -> str:
        what = error.strerror or str(error)
        there = rounds(self._run)
        last = f"the last complete round is {there[-1]}" if there else "no round is complete yet"
        cure = "free space" if error.errno in _FULL else "put it right"
        again = f"`pflmpi resume {self._run}`" if there else "start again"
        return f"{what} while writing {error.filename or self._run}; {last}; {cure} and {again}"


def _run(job: Callable[[], None]) -> BaseException | None:
    """Return what the job raised; whatever it is, the main thread has to learn of it."""
    try:
        job()
    except BaseException as error:
        return error
    return None
