"""Collective error handling: all ranks learn that one of them failed, and the first error is shown once."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from pflmpi.errors import PflmpiError, RunError, UserError, kind_of, of_kind
from pflmpi.transports.base import Transport

T = TypeVar("T")


class CollectiveError(Exception):
    """Raised on all ranks at once; `error` is that of the lowest failing rank, with its full text on rank 0 only."""

    def __init__(self, error: PflmpiError) -> None:
        super().__init__(str(error))
        self.error = error


def all_or_none(transport: Transport, function: Callable[[], T]) -> T:
    """Call `function` on every rank; returns this rank's result once all have succeeded.

    Raises:
        CollectiveError: on all ranks, if `function` raises a `PflmpiError` on any. Any other exception is a defect of
            pflmpi and ends the run at once.
    """
    result, failure = None, None
    try:
        result = function()
    except PflmpiError as error:
        failure = error
    codes = transport.maximum(np.array([0.0 if failure is None else float(failure.exit_code)]))
    if codes[0] == 0:
        return result  # type: ignore[return-value]
    texts = transport.gather_texts("" if failure is None else f"{kind_of(failure)} {failure}")
    if texts is None:
        kind_of_error = UserError if codes[0] == UserError.exit_code else RunError
        raise CollectiveError(kind_of_error("another rank could not start"))
    first, (kind, _, cause) = next((rank, text.partition(" ")) for rank, text in enumerate(texts) if text)
    raise CollectiveError(of_kind(kind, cause if first == 0 else f"rank {first}: {cause}")) from failure


def on_root(transport: Transport, function: Callable[[], str]) -> str:
    """Call `function` on rank 0 and return its text on every rank; raises as `all_or_none`."""
    return transport.broadcast_text(all_or_none(transport, lambda: function() if transport.rank == 0 else ""))
