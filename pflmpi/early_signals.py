"""A signal that asks for a stop before the run has begun: nothing is lost, and the same command can be started again.

Only the standard library is imported here, because this comes before everything that takes seconds.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Mapping

from pflmpi.errors import Stopped, launched_rank, write_exit_code

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# In a rank SIGTERM means that another rank has failed: a launcher of ours forwards these as real-time signals.
FORWARDED: dict[int, int] = {
    signal.SIGTERM: signal.SIGRTMIN + 1,
    signal.SIGHUP: signal.SIGRTMIN + 2,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGUSR2: signal.SIGUSR2,
}
LAUNCHER_ENDED = signal.SIGRTMIN + 3  # what a rank receives when the process that started it has ended

_begun = threading.Event()


def asking() -> list[int]:
    """The signals that ask this process for a stop; not SIGHUP where it is ignored, as under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    own = [number for number in SIGNALS if not (ignored and number == signal.SIGHUP)]
    return [*own, *(number for number in FORWARDED.values() if number not in SIGNALS), LAUNCHER_ENDED]


def described(number: int) -> str:
    """What a signal that asks for a stop says.

    >>> described(signal.SIGTERM), described(FORWARDED[signal.SIGTERM])
    ('SIGTERM came', 'SIGTERM came')
    """
    if number == LAUNCHER_ENDED:
        return "the process that started the ranks ended"
    original = next((key for key, value in FORWARDED.items() if value == number), number)
    return f"{signal.Signals(original).name} came"


def watch(environ: Mapping[str, str]) -> None:
    """End this process with the code of `Stopped` at a signal, until `begun` is called.

    A thread does it: the main one imports torch or waits for other ranks inside a library, where Python runs no
    handlers. To a rank of a launcher SIGTERM says that another rank has failed, and is left to the system.
    """
    _begun.clear()  # it may be set in the process that this one is a fork of
    rank = launched_rank(environ)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    watched = [number for number in asking() if rank is None or number != signal.SIGTERM]
    for number in watched:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def wait() -> None:
        while received := os.read(reader, 1):
            if received[0] in watched and not _begun.is_set():
                if rank in (None, "0"):
                    os.write(2, f"pflmpi: {described(received[0])} before the run had begun; start it again\n".encode())
                with contextlib.suppress(OSError):  # the process ends also where the file cannot be written
                    write_exit_code(environ, Stopped.exit_code)
                os._exit(Stopped.exit_code)

    threading.Thread(target=wait, name="early-signals", daemon=True).start()


def begun() -> None:
    """Leave signals to the handlers that were installed since; after these, signals are ignored."""
    _begun.set()
