"""Waiting for other ranks without blocking the core that they may need, and the error texts of failed waits."""

import re
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_SPIN = 0.0005  # seconds of polling without pauses: a small message between waiting ranks takes less
SHORTEST_PAUSE = 50e-6  # seconds
LONGEST_PAUSE = 2e-3  # seconds
_SHARE = 0.02  # a pause is at most this share of the time waited so far, so that the wait is prolonged little


class WaitTimeout(Exception):
    """A wait exceeded its time limit; `seconds` is how long it lasted."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"{seconds:.1f} s")
        self.seconds = seconds


def wait(
    done: Callable[[], bool], timeout: float, longest: float = LONGEST_PAUSE, check: Callable[[], None] = lambda: None
) -> None:
    """Poll until `done()` is true, first without pauses, then with growing ones.

    Args:
        done: returns whether the operation has ended, and lets it progress.
        timeout: seconds.
        longest: seconds of the longest pause; `SHORTEST_PAUSE` while payload moves.
        check: called once a second; raises if the operation can no longer end.

    Raises:
        WaitTimeout: the operation has not ended in time.
    """
    start, num_checks = time.monotonic(), 0
    while not done():
        waited = time.monotonic() - start
        if waited > timeout:
            raise WaitTimeout(waited)
        if waited > num_checks + 1:
            num_checks += 1
            check()
        if waited < _SPIN:
            time.sleep(0)  # yields the core
        else:
            time.sleep(min(longest, max(SHORTEST_PAUSE, _SHARE * waited)))


def call_within(seconds: float, function: Callable[[], T]) -> T:
    """Calls a function that may never return, in a thread that is abandoned after the time limit.

    Raises:
        WaitTimeout: it has not returned in time.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def call() -> None:
        try:
            results.append(function())
        except Exception as error:
            errors.append(error)

    start = time.monotonic()
    thread = threading.Thread(target=call, name="pflmpi-within", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise WaitTimeout(time.monotonic() - start)
    return results[0]


def describe_timeout(operation: str, waited: float, absent: str) -> str:
    """Returns the error text for an operation that ran into the time limit after `waited` seconds.

    Args:
        absent: names of the ranks that did not arrive; "" if unknown.
    """
    who = f"{absent} did not come to it" if absent else "a rank hangs, was stopped or is slower than that"
    return f"{operation} did not end within {waited:.1f} s: {who}; raise runtime.timeout if ranks may need longer"


def describe_error(error: BaseException) -> str:
    """Returns a library's error text in one line, without control characters and C++ stack traces.

    >>> describe_error(RuntimeError("[/a/p.cc:9] closed.\\nCheck \\x1b[1mport\\nException raised from f (most recent"))
    'closed. Check port'
    """
    text = re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", re.split(r"\nException raised from |\nframe #0: ", str(error))[0])
    plain = "".join(letter if letter.isprintable() else " " if letter.isspace() else "" for letter in text)
    return re.sub(r"^\[\S+:\d+\] ", "", " ".join(plain.split())) or type(error).__name__


def describe_loss(operation: str, cause: Exception, ended: str) -> str:
    """Returns the error text for a connection that broke during an operation.

    Args:
        cause: the library's error.
        ended: names of the ranks on this host that have ended; "" if there are none.
    """
    who = f"{ended} ended or was killed" if ended else "a rank ended or was lost"
    return f"{who} during {operation} ({describe_error(cause)}); its own error, or the launcher's, says why"
