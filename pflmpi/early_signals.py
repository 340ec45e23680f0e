"""A signal that asks for a stop before the run has begun: nothing is lost, and the same command can be started again.

Only the standard library is imported here, because this comes before everything that takes seconds.
"""

import os
import signal
import threading
from collections.abc import Mapping

from pflmpi.errors import Stopped, write_exit_code

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "RANK", "SLURM_PROCID")
_begun = threading.Event()


def watch(environ: Mapping[str, str]) -> None:
    """End this process with the code of `Stopped` at a signal, until `begun` is called.

    A thread does it: the main one imports torch or waits for other ranks inside a library, where Python runs no
    handlers. To a rank of a launcher SIGTERM says that another rank has failed, and is left to the system.
    """
    _begun.clear()  # it may be set in the process that this one is a fork of
    rank = next((environ[name] for name in _RANKS if name in environ), None)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in SIGNALS if rank is None else SIGNALS[1:]:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def wait() -> None:
        while received := os.read(reader, 1):
            if received[0] in SIGNALS and not _begun.is_set():
                if rank in (None, "0"):
                    name = signal.Signals(received[0]).name
                    os.write(2, f"pflmpi: {name} came before the run had begun; start it again\n".encode())
                write_exit_code(environ, Stopped.exit_code)
                os._exit(Stopped.exit_code)

    threading.Thread(target=wait, name="early-signals", daemon=True).start()


def begun() -> None:
    """Leave signals to the handlers that were installed since; after these, signals are ignored."""
    _begun.set()
