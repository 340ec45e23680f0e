"""Stopping a run before its last round: after a signal, before a batch job's time limit, or by `training.stop`."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np

from pflmpi import early_signals
from pflmpi.errors import RunError, Stopped
from pflmpi.learning.early_stop import EarlyStop
from pflmpi.transports.base import Transport

Pause = Literal["end", "stop"]  # early stop; a signal or the time limit

_PAUSES: tuple[Pause | None, ...] = (None, "stop", "end")
_SPARE_ROUNDS = 2.0  # so many of the longest rounds must still fit before the end of the job
_SAME_SIGNAL = 1.0  # seconds within which a launcher and Slurm may both send the same signal
_LOST_INTERRUPT = 0  # instead of a signal's number: Python dropped a KeyboardInterrupt that was raised in a callback
_CALLBACK = 0.05  # seconds for the callback to end


class Stop:
    """Whether this rank has a reason to stop after the current round.

    Attributes:
        reason: the reason; "" without one.
        longest: seconds of the longest round so far.
        early: state of `training.stop`; only rank 0's is used.
        at_once: called before a second signal ends this process immediately.

    Args:
        end: end of the batch job in seconds since the epoch; None without a time limit.
        spare: seconds before the end that are kept free for the last checkpoint.
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
        """Seconds of the longest round of this rank, and 1.0 if it has a reason to stop."""
        return self.longest, float(bool(self.reason))

    def agree(self, transport: Transport, seconds: float, reports: np.ndarray | None) -> Pause | None:
        """Agree on whether and why to stop after a round of so many seconds; also synchronises `longest`.

        Args:
            reports: on rank 0, [R, 2] the `report` of each rank; None elsewhere.
        """
        self.round_took(seconds)
        agreed = np.zeros(2)
        if reports is not None:
            pause: Pause | None = "stop" if reports[:, 1].any() or self.reason else None
            if self.early.met:
                pause = "end"
            agreed[:] = [max(reports[:, 0].max(), self.longest), _PAUSES.index(pause)]
        transport.broadcast(agreed.view(np.uint8))
        self.longest = float(agreed[0])
        return _PAUSES[int(agreed[1])]

    def interruption(self, round: int) -> Stopped:
        """The exception that all ranks raise when they stop after a round."""
        return Stopped(f"{self.reason or 'another rank was asked to stop'}: stopped after round {round}")


@contextmanager
def noted_signals(stop: Stop, someone_died: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Stop after the current round at the first signal, and end this process immediately at a later one.

    A thread reads the signals, because the main thread may wait inside a library, where Python runs no handlers.

    Args:
        stop: receives the reason.
        someone_died: called at SIGTERM; if true, the launcher sent the signal because a rank died, so that no round can
            be completed any more.
    """
    reader, writer = socket.socketpair()
    watched = early_signals.list_stop_signals()
    with reader, writer:
        thread = threading.Thread(
            target=_watch_signals, args=(reader, watched, stop, someone_died), name="signals", daemon=True
        )
        thread.start()  # may fail at a limit of the system, before anything is changed
        writer.setblocking(False)
        wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, lambda *_: None) for number in watched}
        try:
            with _reporting_lost_interrupts(writer):
                yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            writer.close()
            thread.join()


def _watch_signals(
    reader: socket.socket, watched: Collection[int], stop: Stop, someone_died: Callable[[], bool]
) -> None:
    """Read signal numbers until the other end is closed; see `noted_signals`."""
    first = 0.0  # when the first signal came
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
        stop.reason = stop.reason or early_signals.describe_signal(number)


@contextmanager
def _reporting_lost_interrupts(writer: socket.socket) -> Iterator[None]:
    """Write to `writer` when Python drops a KeyboardInterrupt, as while it clears a weak reference of PyTorch."""
    original = sys.unraisablehook

    def report(unraisable: "sys.UnraisableHookArgs") -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            writer.send(bytes([_LOST_INTERRUPT]))
        else:
            original(unraisable)

    sys.unraisablehook = report
    try:
        yield
    finally:
        sys.unraisablehook = original


def _exit_now(code: int) -> None:
    sys.stdout.flush()
    os._exit(code)
