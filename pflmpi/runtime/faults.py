"""Errors that concern all ranks: they agree that there is one, and show the first cause once."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from pflmpi.errors import PflmpiError, RunError, UserError, kind_of, of_kind
from pflmpi.transports.base import Transport

T = TypeVar("T")


class CollectiveError(Exception):
    """Raised on all ranks at once; `error` is the first rank's and complete on rank 0."""

    def __init__(self, error: PflmpiError) -> None:
        super().__init__(str(error))
        self.error = error


def all_or_none(transport: Transport, function: Callable[[], T]) -> T:
    """The result of `function` here, once it has succeeded on every rank.

    Raises:
        CollectiveError: on all ranks, if `function` raises a `PflmpiError` on any: that of the lowest such rank. Any
            other error is a defect of pflmpi and ends the run at once.
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
        other = UserError if codes[0] == UserError.exit_code else RunError
        raise CollectiveError(other("another rank could not start"))
    first, (kind, _, cause) = next((rank, text.partition(" ")) for rank, text in enumerate(texts) if text)
    raise CollectiveError(of_kind(kind, cause if first == 0 else f"rank {first}: {cause}")) from failure


def on_root(transport: Transport, function: Callable[[], str]) -> str:
    """The text that `function` returns on rank 0, on every rank; raises as `all_or_none` does."""
    return transport.broadcast_text(all_or_none(transport, lambda: function() if transport.rank == 0 else ""))
