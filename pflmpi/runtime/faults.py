"""What ranks do all_or_none when something is wrong: agree on it, show the first cause once, stop."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from pflmpi.errors import PflmpiError, RunError, UserError
from pflmpi.transports.base import Transport
from pflmpi.transports.text import gather_texts

T = TypeVar("T")


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
    texts = gather_texts(transport, "" if failure is None else str(failure))
    kind = UserError if codes[0] == UserError.exit_code else RunError
    if texts is None:
        raise CollectiveError(kind("another rank could not start"))
    first, cause = next((rank, text) for rank, text in enumerate(texts) if text)
    raise CollectiveError(kind(cause if first == 0 else f"rank {first}: {cause}")) from failure
