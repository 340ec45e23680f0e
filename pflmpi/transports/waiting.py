"""Waiting for other ranks without burning the core that they may need."""

import re
import time
from collections.abc import Callable

from pflmpi.errors import TransportError

_SPIN = 0.0005  # seconds of asking without a pause: a small message between ready ranks takes less
SHORTEST = 50e-6  # seconds of a pause
LONGEST = 2e-3
_SHARE = 0.02  # a pause is at most this part of the time waited so far, so that little is lost when the wait ends


def wait(done: Callable[[], bool], timeout: float, operation: str, longest: float = LONGEST) -> None:
    """Return once `done()` is true; ask often at first, then with longer and longer pauses.

    Args:
        done: asks whether the operation has ended, and moves it along.
        timeout: seconds.
        operation: its name, for the error.
        longest: seconds of the longest pause; `SHORTEST` when payload is moving.

    Raises:
        TransportError: the time is up.
    """
    start = time.monotonic()
    while not done():
        waited = time.monotonic() - start
        if waited > timeout:
            raise TransportError(timed_out(operation, waited))
        if waited < _SPIN:
            time.sleep(0)  # lets another rank on this core go first
        else:
            time.sleep(min(longest, max(SHORTEST, _SHARE * waited)))


def timed_out(operation: str, waited: float) -> str:
    """Return the error text for an operation that did not end within the time limit."""
    return (
        f"{operation} did not end within {waited:.1f} s: a rank hangs, was stopped or is slower than that; "
        "raise runtime.timeout if ranks may need longer"
    )


def lost(operation: str, cause: Exception) -> str:
    """Return the error text for a connection that broke during an operation."""
    line = str(cause).strip().partition("\n")[0] or type(cause).__name__
    short = re.sub(r"^\[\S+:\d+\] ", "", line).partition(". ")[0]  # without the library's own file and advice
    return f"a rank ended or was lost during {operation} ({short[:160]}); its own error, or the launcher's, says why"
