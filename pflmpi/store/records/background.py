"""The process that turns records into HDF5 while a run goes on: `python -m pflmpi.store.records.background RUN TOKEN`.

It needs neither torch nor MPI, and computes only when nobody else wants to. It ends when the process that started it
says so, and, after all that is complete, when that one has died.
"""

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

from pflmpi.early_signals import SIGNALS
from pflmpi.errors import PflmpiError, RunError, kind_of, of_kind
from pflmpi.store.lock.run_lock import RunLock
from pflmpi.store.records.conversion import convert, explained

_AFTER = 2.0  # seconds after the first record: a shorter run does it at its end
_EVERY = 2.0  # seconds from one look for records to the next
_NICE = 19
_ENOUGH = "enough\n"  # said to the process at the end of the run, which does the rest itself, at its own priority
_log = logging.getLogger(__name__)


class Background:
    """Starts the process a while after the first record, and waits for it at the end.

    Args:
        run: the folder of the run.
        lock: of the run; without it nothing is written.
    """

    def __init__(self, run: Path, lock: RunLock) -> None:
        self._run, self._lock = run, lock
        self._process: subprocess.Popen[str] | None = None
        self._timer: threading.Timer | None = None

    def begin(self) -> None:
        """There are records from now on."""
        if self._timer is None:
            self._timer = threading.Timer(_AFTER, self._start)
            self._timer.daemon = True
            self._timer.start()

    def check(self) -> None:
        """Raise the error that the process ended with.

        Raises:
            RunError: a file could not be written, or the run belongs to another process by now.
        """
        if self._process is not None and self._process.poll() is not None:
            self._ended()

    def end(self) -> None:
        """Turn all that is complete into HDF5; raises as `check` and `convert` do."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.write(_ENOUGH)
                self._process.stdin.flush()
            self._process.wait()
            self._ended()
        self._lock.check()
        try:
            convert(self._run, self._lock.check)
        except OSError as error:
            raise RunError(explained(self._run, error)) from error

    def _start(self) -> None:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        command = [sys.executable, "-P", "-m", __name__, str(self._run.absolute()), self._lock.token]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **threads, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        except OSError as error:
            _log.warning("checkpoints become HDF5 at the end of the run: no process can be started: %s", error.strerror)

    def _ended(self) -> None:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):  # what it has not read is of no use any more
            self._process.stdin.close()
        with self._process.stdout as said:
            kind, _, text = said.read().partition(" ")
        code, self._process = self._process.returncode, None
        if text:
            raise of_kind(kind, text.strip())
        if code != 0:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
            _log.warning("checkpoints become HDF5 at the end of the run: the process that does it %s", how)


class _Heard(Exception):
    """There is something on standard input, or its end."""


def main() -> int:
    """Follow the records of a run until the process that started this one ends it, or dies; return the exit code."""
    for number in (*SIGNALS, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the run decides when it ends
    parent = os.getppid()
    run, lock = Path(sys.argv[1]), RunLock(Path(sys.argv[1]), sys.argv[2])
    os.nice(_NICE)

    def listen(seconds: float) -> None:
        if select.select([sys.stdin], [], [], seconds)[0] or os.getppid() != parent:
            raise _Heard

    def check() -> None:
        lock.check()
        listen(0.0)

    try:
        with contextlib.suppress(_Heard):
            while True:
                convert(run, check)
                listen(_EVERY)
        if os.getppid() != parent or sys.stdin.readline() != _ENOUGH:  # it died
            convert(run, lock.check)
    except (PflmpiError, OSError) as error:
        text = explained(run, error) if isinstance(error, OSError) else str(error)
        with contextlib.suppress(OSError):
            print(kind_of(error), text, flush=True)
        return RunError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
