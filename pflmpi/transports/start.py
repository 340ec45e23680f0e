"""Starting one process per rank on this machine as forks of this one, which share its imported modules.

Importing PyTorch takes a second or two and a tenth of a gigabyte. Forks cannot use a GPU once this process has called
its driver; with GPUs each one is replaced by a new Python (`exec_python`).
"""

import ctypes
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pflmpi import early_signals
from pflmpi.errors import RunError, Stopped, explained, show
from pflmpi.transports.base import flush_output
from pflmpi.transports.detect import new_run_id
from pflmpi.transports.torch_store import listen, open_store

_LOOPBACK = "127.0.0.1"
_SHUTDOWN = 8.0  # seconds for ranks to end after a signal, before they are killed
_STORE_TIMEOUT = 60.0  # seconds for the store to open
_GRACE = 0.1  # seconds for the other ranks to end by themselves after one has failed
_POLL_INTERVAL = 0.02  # seconds
_PR_SET_PDEATHSIG = 1  # of prctl(2)


@dataclass(frozen=True)
class Failed:
    """The rank that failed first, and its exit code (negative: the signal that killed it)."""

    rank: int
    code: int


def exec_python(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by a new Python with these arguments."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # otherwise libraries start a thread per core in each rank
    os.execv(sys.executable, [sys.executable, *arguments])


def fork_ranks(ranks: int, run: Callable[[], int]) -> Failed | None:
    """Call `run`, which returns an exit code, on every rank; returns None if all succeed.

    Signals that request a stop are forwarded to the ranks as `early_signals.FORWARDED`; ranks receive SIGTERM only if
    another one has died. Their environment is that of torchrun. If this process is killed, they stop after their round.
    """
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # unless the user has set an interface
    parent = os.getpid()
    listening = listen(_LOOPBACK, 0)
    port, name = listening.getsockname()[1], new_run_id()
    alive: dict[int, int] = {}  # rank by process id
    try:
        with _forward_signals(alive):
            for rank in range(ranks):
                flush_output()  # otherwise the fork would write it again
                # Blocked until the fork has its own handlers.
                mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, *early_signals.SIGNALS))
                try:
                    if (process := _fork()) == 0:
                        _become_rank(_make_environment(rank, ranks, port, name), parent, listening, run, mask)
                    alive[process] = rank
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            _store = open_store(_LOOPBACK, port, listening, _STORE_TIMEOUT)  # referenced while ranks use it
            failed = _wait_for_failure(alive)
    except BaseException:
        listening.close()
        _end_ranks(alive, signal.SIGINT)
        raise
    if failed is not None:
        time.sleep(_GRACE)
        _end_ranks(alive, signal.SIGTERM)
    return failed


def _fork() -> int:
    with warnings.catch_warnings():  # Python 3.12 warns of other threads, which may hold locks; ours only wait to read
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _become_rank(
    environment: Mapping[str, str],
    parent: int,
    listening: socket.socket,
    run: Callable[[], int],
    mask: Iterable[int],
) -> NoReturn:
    """Run a rank in a new fork, and end the process; `mask`: its signal mask, once it has its own handlers."""
    code = RunError.exit_code
    try:
        os.setsid()  # so that only the parent receives the terminal's interrupt, which it forwards
        listening.close()
        os.environ.update(environment)
        for number in early_signals.SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        early_signals.watch(os.environ)
        _stop_with_parent(parent)
        code = run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else RunError.exit_code
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except Exception as error:
        fault = explained(error, RunError)
        if not isinstance(fault, RunError):
            traceback.print_exc()
        elif environment["RANK"] == "0":
            show(fault)
    finally:
        flush_output()
        os._exit(code)


def _stop_with_parent(parent: int) -> None:
    """Send this process a signal to stop when its parent ends, however it does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, early_signals.LAUNCHER_ENDED)
    if os.getppid() != parent:  # it has ended before
        os.kill(os.getpid(), early_signals.LAUNCHER_ENDED)


def _make_environment(rank: int, ranks: int, port: int, name: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": name,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _wait_for_failure(alive: dict[int, int]) -> Failed | None:
    """Wait until a rank fails, or all have ended; ranks that ended are removed from `alive`.

    It polls, because Python would not handle a signal that comes just before a blocking wait.
    """
    while alive:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process == 0:
            time.sleep(_POLL_INTERVAL)
            continue
        rank, code = alive.pop(process, None), os.waitstatus_to_exitcode(status)
        if rank is not None and code != 0:
            return Failed(rank, code)
    return None


def _end_ranks(alive: dict[int, int], number: signal.Signals) -> None:
    """Send a signal to the ranks, and kill those that do not end."""
    for ending in (number, signal.SIGKILL):
        for process in alive:
            with suppress(ProcessLookupError):
                os.kill(process, ending)
        end = time.monotonic() + _SHUTDOWN
        while alive and time.monotonic() < end:
            for process in list(alive):
                if os.waitpid(process, os.WNOHANG)[0]:
                    del alive[process]
            time.sleep(_POLL_INTERVAL)


@contextmanager
def _forward_signals(alive: Mapping[int, int]) -> Iterator[None]:
    """Forward signals that request a stop to the processes in `alive`."""

    def send(number: int, _: object) -> None:
        if not alive:
            raise Stopped(f"{early_signals.describe_signal(number)} before the run had begun; start it again")
        for process in list(alive):
            with suppress(ProcessLookupError):
                os.kill(process, early_signals.FORWARDED[number])

    watched = [number for number in early_signals.list_stop_signals() if number in early_signals.FORWARDED]
    handlers = {number: signal.signal(number, send) for number in watched}
    early_signals.stop_watching()
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
