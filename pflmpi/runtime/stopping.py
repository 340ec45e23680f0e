"""When a run should stop before its last round: after a signal, or before the end of a batch job."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pflmpi.errors import RunError, Stopped

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_ROUNDS = 2.0  # as many of the longest rounds so far must still fit before the end of the job
_ONE_WISH = 1.0  # seconds in which a launcher and Slurm may send the same wish twice


class Stop:
    """Whether this rank has a reason to stop after the current round.

    Attributes:
        reason: which; "" without one.
        longest: seconds of the longest round so far.

    Args:
        end: when the batch job ends, in seconds since the epoch; None if nobody says.
        spare: seconds before it that the run leaves for its last checkpoint.
    """

    def __init__(self, end: float | None = None, spare: float = 0.0) -> None:
        self.reason = ""
        self._end = end
        self._spare = spare
        self.longest = 0.0

    def round_took(self, seconds: float) -> None:
        """Take note of how long a round was."""
        self.longest = max(self.longest, seconds)
        if self._end is not None and time.time() + _ROUNDS * self.longest + self._spare > self._end:
            self.reason = self.reason or "the job's time limit is near"


@contextmanager
def noted_signals(stop: Stop, someone_died: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Let the first signal to stop set the reason, and a second one, a while later, end this process at once.

    A thread reads the signals, because the main one may wait inside of a library, where Python runs no handlers.

    Args:
        stop: where the reason is noted.
        someone_died: asked at SIGTERM. If it is true, a launcher has sent the signal because a rank died, and no round
            can be completed any more.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        first = 0.0
        while received := reader.recv(1):
            number = received[0]
            if number not in SIGNALS:  # such as SIGINT, which Python handles
                continue
            if number == signal.SIGTERM and someone_died():
                _leave(RunError.exit_code)
            if first and time.monotonic() - first > _ONE_WISH:
                _leave(Stopped.exit_code)
            first = first or time.monotonic()
            stop.reason = stop.reason or f"{signal.Signals(number).name} came"

    thread = threading.Thread(target=watch, name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        writer.close()
        thread.join()
        reader.close()


def _leave(code: int) -> None:
    sys.stdout.flush()
    os._exit(code)
