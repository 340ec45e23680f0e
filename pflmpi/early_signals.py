"""Signals that ask for a stop before the run has begun: the process ends, and the same command can be started again.

Imports only the standard library, because this runs before the imports that take seconds.
"""

import os
import signal
import threading
from collections.abc import Mapping

from pflmpi.errors import Stopped, launched_rank, write_exit_code

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# To a rank SIGTERM means that another rank failed, so our launcher forwards its own SIGTERM and SIGHUP in disguise.
FORWARDED: dict[int, int] = {
    signal.SIGTERM: signal.SIGRTMIN + 1,
    signal.SIGHUP: signal.SIGRTMIN + 2,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGUSR2: signal.SIGUSR2,
}
LAUNCHER_ENDED = signal.SIGRTMIN + 3  # sent to a rank when the process that started it has ended

_begun = threading.Event()


def list_stop_signals() -> list[int]:
    """The signals by which this process is asked to stop; without SIGHUP where it is ignored, as under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    own = [number for number in SIGNALS if not (ignored and number == signal.SIGHUP)]
    return [*own, *(number for number in FORWARDED.values() if number not in SIGNALS), LAUNCHER_ENDED]


def describe_signal(number: int) -> str:
    """Describe a signal that asks for a stop.

    >>> describe_signal(signal.SIGTERM), describe_signal(FORWARDED[signal.SIGTERM])
    ('SIGTERM came', 'SIGTERM came')
    """
    if number == LAUNCHER_ENDED:
        return "the process that started the ranks ended"
    original = next((key for key, value in FORWARDED.items() if value == number), number)
    return f"{signal.Signals(original).name} came"


def watch(environ: Mapping[str, str]) -> None:
    """End this process with the exit code of `Stopped` at a signal, until `stop_watching` is called.

    A thread does so, because the main thread imports torch or waits for other ranks inside a library, where Python runs
    no signal handlers. To a rank of a launcher SIGTERM means that another rank failed; it keeps its default action.
    """
    _begun.clear()  # a fork inherits it
    rank = launched_rank(environ)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    watched = [number for number in list_stop_signals() if rank is None or number != signal.SIGTERM]
    for number in watched:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def wait() -> None:
        while received := os.read(reader, 1):
            if received[0] in watched and not _begun.is_set():
                if rank in (None, "0"):
                    os.write(
                        2, f"pflmpi: {describe_signal(received[0])} before the run had begun; start it again\n".encode()
                    )
                write_exit_code(environ, Stopped.exit_code)
                os._exit(Stopped.exit_code)

    threading.Thread(target=wait, name="early-signals", daemon=True).start()


def stop_watching() -> None:
    """Stop watching: from now on, signals are left to the handlers installed since."""
    _begun.set()
