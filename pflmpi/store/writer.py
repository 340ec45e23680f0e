"""A thread that writes checkpoints while the rank computes."""

import atexit
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from pflmpi import atomic
from pflmpi.errors import PflmpiError, RunError
from pflmpi.store.names import rounds
from pflmpi.text import for_shell

_MOST_WAITING = 2


class Writer:
    """Runs jobs one after the other in its own thread, with at most two waiting.

    After an error no later job runs: a round file must not follow a missing shard. The error is raised by the next call
    of `submit`, `check`, `flush` or `close`, and by every later one. At a normal end of the program the submitted jobs
    are completed, even without `close`.

    Args:
        run: the folder of the run, for error messages.
    """

    def __init__(self, run: str | Path) -> None:
        self._run = Path(run)
        self._waiting: deque[Callable[[], None]] = deque()
        self._running = False
        self._closed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        # A daemon, so that a failing program never waits for a thread that waits for jobs; `atexit` ensures that it is
        # not stopped half-way.
        self._thread = threading.Thread(target=self._work, name="checkpoint writer", daemon=True)
        self._thread.start()
        atexit.register(self._finish)

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job; blocks while two others are waiting.

        Raises:
            RunError: an earlier job failed; this one is dropped.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < _MOST_WAITING or self._error is not None)
            self._raise()
            assert not self._closed, "the writer is closed"
            self._waiting.append(job)
            self._changed.notify_all()

    def check(self) -> None:
        """Raise the error of an earlier job.

        Raises:
            RunError: the job failed; names the file, the last complete round, and what to do.
        """
        with self._changed:
            self._raise()

    def flush(self) -> None:
        """Wait until all jobs are done; raises like `check`."""
        with self._changed:
            self._changed.wait_for(self._idle)
            self._raise()

    def close(self, wait: bool = True) -> None:
        """End the thread after the submitted jobs; raises like `check`.

        Args:
            wait: False drops the jobs that have not begun and does not wait for the one that has.
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
        """End the thread after the running job and drop those that have not begun; never raises."""
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
            del job  # frees the arrays that it holds
            with self._changed:
                self._running = False
                self._error = error
                if error is not None:
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
            raise RunError(_explained(self._run, error)) from error
        raise RunError(f"writing a checkpoint of {self._run} failed: {type(error).__name__}: {error}") from error


def _run(job: Callable[[], None]) -> BaseException | None:
    """Exception that the job raised, of any kind: the main thread must learn of it."""
    try:
        job()
    except BaseException as error:
        return error
    return None


def _explained(run: Path, error: OSError) -> str:
    """What happened while a checkpoint was written, what is there, and what to do."""
    what, complete = error.strerror or str(error), rounds(run)
    last = f"the last complete round is {complete[-1]}" if complete else "no round is complete yet"
    again = f"`pflmpi resume {for_shell(run)}`" if complete else "start again"
    return f"{what} while writing {error.filename or run}; {last}; {atomic.remedy(error)} and {again}"
