"""Waiting for other ranks without burning the core that they may need."""

import re
import time
from collections.abc import Callable

_SPIN = 0.0005  # seconds of asking without a pause: a small message between ready ranks takes less
SHORTEST = 50e-6  # seconds of a pause
LONGEST = 2e-3
_SHARE = 0.02  # a pause is at most this part of the time waited so far, so that little is lost when the wait ends


class TimeIsUp(Exception):
    """A wait has not ended within its time limit; `seconds` is how long it was."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"{seconds:.1f} s")
        self.seconds = seconds


def wait(done: Callable[[], bool], timeout: float, longest: float = LONGEST) -> None:
    """Return once `done()` is true; ask often at first, then with longer and longer pauses.

    Args:
        done: asks whether the operation has ended, and moves it along.
        timeout: seconds.
        longest: seconds of the longest pause; `SHORTEST` when payload is moving.

    Raises:
        TimeIsUp: the operation has not ended in time.
    """
    start = time.monotonic()
    while not done():
        waited = time.monotonic() - start
        if waited > timeout:
            raise TimeIsUp(waited)
        if waited < _SPIN:
            time.sleep(0)  # lets another rank on this core go first
        else:
            time.sleep(min(longest, max(SHORTEST, _SHARE * waited)))


def timed_out(operation: str, waited: float, absent: str) -> str:
    """Return the error text for an operation that did not end within the time limit.

    Args:
        operation: its name.
        waited: seconds.
        absent: the ranks that did not come to it; "" if that is not known.
    """
    who = f"{absent} did not come to it" if absent else "a rank hangs, was stopped or is slower than that"
    return f"{operation} did not end within {waited:.1f} s: {who}; raise runtime.timeout if ranks may need longer"


def lost(operation: str, cause: Exception, ended: str) -> str:
    """Return the error text for a connection that broke during an operation.

    Args:
        operation: its name.
        cause: what the library says.
        ended: the ranks of this host that have ended; "" if there is none.
    """
    line = str(cause).strip().partition("\n")[0] or type(cause).__name__
    short = re.sub(r"^\[\S+:\d+\] ", "", line).partition(". ")[0]  # without the library's own file and advice
    who = f"{ended} ended or was killed" if ended else "a rank ended or was lost"
    return f"{who} during {operation} ({short[:160]}); its own error, or the launcher's, says why"
