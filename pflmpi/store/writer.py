"""A thread that writes checkpoints while the rank computes."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from pflmpi import atomic
from pflmpi.errors import PflmpiError, RunError
from pflmpi.store.names import rounds
from pflmpi.text import for_shell

_MOST_WAITING = 2


class Writer:
    """Runs jobs one after the other in its own thread, with at most two waiting.

    After an error no later job runs: a round file must not follow a missing shard. The error is raised by every later
    call of `submit`, `check`, `flush` and `close`. When the program ends normally, submitted jobs are completed, even
    without `close`.

    Args:
        run: the folder of the run, for error messages.
    """

    def __init__(self, run: str | Path) -> None:
        self._run = Path(run)
        self._thread = ThreadPoolExecutor(1, "checkpoint writer")
        self._jobs: deque[Future[None]] = deque()
        self._error: BaseException | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job; blocks while two others are waiting.

        Raises:
            RunError: an earlier job failed; this one is dropped.
        """
        while len(self._jobs) > _MOST_WAITING or (self._jobs and self._jobs[0].done()):
            wait([self._jobs.popleft()])
        self.check()
        self._jobs.append(self._thread.submit(self._attempt, job))

    def check(self) -> None:
        """Raise the error of an earlier job.

        Raises:
            RunError: the job failed; names the file, the last complete round, and what to do.
        """
        error = self._error
        if error is None:
            return
        if isinstance(error, PflmpiError):
            raise error
        if isinstance(error, OSError):
            raise RunError(_explain(self._run, error)) from error
        raise RunError(f"writing a checkpoint of {self._run} failed: {type(error).__name__}: {error}") from error

    def flush(self) -> None:
        """Wait until all jobs are done; raises like `check`."""
        wait(self._jobs)
        self.check()

    def close(self) -> None:
        """End the thread after the submitted jobs; raises like `check`."""
        self._thread.shutdown()
        self.check()

    def abandon(self) -> None:
        """End the thread after the running job and drop those that have not begun; never raises."""
        self._thread.shutdown(cancel_futures=True)
        self._jobs.clear()  # `wait` would not return for those that were cancelled

    def _attempt(self, job: Callable[[], None]) -> None:
        """Run a job unless an earlier one failed; keep any error for the main thread."""
        if self._error is None:
            try:
                job()
            except BaseException as error:
                self._error = error


def _explain(run: Path, error: OSError) -> str:
    """Returns what failed, the last complete round, and what to do."""
    what, complete = error.strerror or str(error), rounds(run)
    last = f"the last complete round is {complete[-1]}" if complete else "no round is complete yet"
    again = f"`pflmpi resume {for_shell(run)}`" if complete else "start again"
    return f"{what} while writing {error.filename or run}; {last}; {atomic.remedy(error)} and {again}"
