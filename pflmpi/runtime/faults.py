"""What ranks do all_or_none when something is wrong: agree on it, show the first cause once, stop."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from pflmpi.errors import PflmpiError, RunError, UserError
from pflmpi.transports.base import Transport

T = TypeVar("T")
_TEXT = 4096  # bytes of an error text that travel


class CollectiveError(Exception):
    """All ranks know that the run cannot start; `error` is the first rank's and complete on rank 0."""

    def __init__(self, error: PflmpiError) -> None:
        super().__init__(str(error))
        self.error = error


def all_or_none(transport: Transport, function: Callable[[], T]) -> T:
    """Return what the function returns here, once it has succeeded on every rank.

    If it raises a `PflmpiError` on any rank, `CollectiveError` is raised on all of them, with the lowest rank's error.
    Anything else that it raises is a defect of ours and ends the run at once.
    """
    result, failure = None, None
    try:
        result = function()
    except PflmpiError as error:
        failure = error
    codes = transport.maximum(np.array([0.0 if failure is None else float(failure.exit_code)]))
    if codes[0] == 0:
        return result  # type: ignore[return-value]
    mine = np.zeros(_TEXT, np.uint8)
    if failure is not None:
        text = str(failure).encode()[: _TEXT - 1]
        mine[: len(text)] = np.frombuffer(text, np.uint8)
    texts = transport.gather(mine, [_TEXT] * transport.size)
    kind = UserError if codes[0] == UserError.exit_code else RunError
    if texts is None:
        raise CollectiveError(kind("another rank could not start"))
    found = [(rank, bytes(text).rstrip(b"\0").decode(errors="replace")) for rank, text in enumerate(texts)]
    first, cause = next((rank, text) for rank, text in found if text)
    raise CollectiveError(kind(cause if first == 0 else f"rank {first}: {cause}")) from failure
