"""When a run should pause before its last round: after a signal, or before the end of a batch job.

Or end: by `training.stop`.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np

from pflmpi import early_signals
from pflmpi.errors import RunError, Stopped
from pflmpi.learning.early_stop import EarlyStop
from pflmpi.transports.base import Transport

_SPARE_ROUNDS = 2.0  # as many of the longest rounds so far must still fit before the end of the job
Pause = Literal["end", "stop"]

_PAUSES: tuple[Pause | None, ...] = (None, "stop", "end")  # in ascending order of precedence
_SAME_SIGNAL = 1.0  # seconds within which a launcher and Slurm may both send the same signal
_LOST_INTERRUPT = 0  # instead of a signal's number: Python dropped a KeyboardInterrupt that was raised in a callback
_CALLBACK = 0.05  # seconds for it to end


class Stop:
    """Whether this rank has a reason to stop after the current round.

    Attributes:
        reason: which; "" without one.
        longest: seconds of the longest round so far.
        early: whether the run ends early; rank 0's counts.
        at_once: called before this process ends at once, at a second signal.

    Args:
        end: when the batch job ends, in seconds since the epoch; None where it has no time limit.
        spare: seconds before the end that are left for the last checkpoint.
    """

    def __init__(self, end: float | None = None, spare: float = 0.0) -> None:
        self.reason = ""
        self._end = end
        self._spare = spare
        self.longest = 0.0
        self.early = EarlyStop()
        self.at_once: Callable[[], None] = lambda: None

    def round_took(self, seconds: float) -> None:
        self.longest = max(self.longest, seconds)
        if self._end is not None and time.time() + _SPARE_ROUNDS * self.longest + self._spare > self._end:
            self.reason = self.reason or "the job's time limit is near"

    @property
    def report(self) -> tuple[float, float]:
        """Seconds of the longest round of this rank, and whether it has a reason to stop."""
        return self.longest, float(bool(self.reason))

    def agree(self, transport: Transport, seconds: float, reports: np.ndarray | None) -> Pause | None:
        """Agree on whether and why to stop after a round of so many seconds; also synchronises `longest`.

        Args:
            reports: on rank 0, [R, 2] the `report` of each rank; None elsewhere.
        """
        self.round_took(seconds)
        agreed = np.zeros(2)
        if reports is not None:
            longest, stops = max(reports[:, 0].max(), self.longest), reports[:, 1].any()
            pause: Pause | None = "stop" if stops or self.reason else None
            pause = "end" if self.early.met else pause
            agreed[:] = [longest, _PAUSES.index(pause)]
        transport.broadcast(agreed.view(np.uint8))
        self.longest = float(agreed[0])
        return _PAUSES[int(agreed[1])]

    def interruption(self, round: int) -> Stopped:
        """Exception that all ranks raise where they stop after a round."""
        return Stopped(f"{self.reason or 'another rank was asked to stop'}: stopped after round {round}")


@contextmanager
def noted_signals(stop: Stop, someone_died: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Stop after the round at the first signal, and end this process at once at a second one, a while later.

    A thread reads the signals, because the main one may wait inside a library, where Python runs no handlers. An
    interrupt that comes while a weak reference of PyTorch is cleared would be lost: it is sent again.

    Args:
        stop: gets the reason.
        someone_died: asked at SIGTERM. If true, the launcher sent the signal because a rank died, and no round can be
            completed any more.
    """
    reader, writer = socket.socketpair()
    watched = early_signals.asking()

    def watch() -> None:
        first = 0.0
        while received := reader.recv(1):
            number = received[0]
            if number == _LOST_INTERRUPT:
                time.sleep(_CALLBACK)
                os.kill(os.getpid(), signal.SIGINT)
            if number not in watched:  # such as SIGINT, which Python handles
                continue
            if number == signal.SIGTERM and someone_died():
                _exit_now(RunError.exit_code)
            if first and time.monotonic() - first > _SAME_SIGNAL:
                stop.at_once()
                _exit_now(Stopped.exit_code)
            first = first or time.monotonic()
            stop.reason = stop.reason or early_signals.described(number)

    drop = sys.unraisablehook

    def dropped(unraisable: "sys.UnraisableHookArgs") -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            writer.send(bytes([_LOST_INTERRUPT]))
        else:
            drop(unraisable)

    with reader, writer:
        thread = threading.Thread(target=watch, name="signals", daemon=True)
        thread.start()  # which limits of the system may refuse
        writer.setblocking(False)
        wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        before = {number: signal.signal(number, lambda *_: None) for number in watched}
        sys.unraisablehook = dropped
        try:
            yield
        finally:
            sys.unraisablehook = drop
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            writer.close()
            thread.join()


def _exit_now(code: int) -> None:
    sys.stdout.flush()
    os._exit(code)
