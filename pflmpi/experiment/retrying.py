"""Calls that all ranks make together, and that survivors repeat when a rank is lost in them."""

import logging
from collections.abc import Callable
from typing import TypeVar

from pflmpi.errors import RankLost
from pflmpi.runtime.faults import all_or_none, on_root
from pflmpi.transports.base import Transport
from pflmpi.transports.peers import names

T = TypeVar("T")
_log = logging.getLogger(__name__)


def retry_after_rank_loss(transport: Transport, function: Callable[[], T]) -> T:
    """Call `function` on all ranks; when one is lost in it, all that are left call it again.

    Raises:
        TransportError: the transport cannot continue without a rank.
    """
    while True:
        lost = False
        try:
            result = function()
        except RankLost:
            lost = True
        if transport.all_well(not lost):
            return result
        drop_lost(transport)


def retried_all_or_none(transport: Transport, function: Callable[[], T]) -> T:
    """The result of a function that succeeds on all ranks; see `all_or_none`."""
    return retry_after_rank_loss(transport, lambda: all_or_none(transport, function))


def retried_on_root(transport: Transport, function: Callable[[], str]) -> str:
    """The text of a function on rank 0, on every rank; where rank 0 dies, the next one calls it again."""
    return retry_after_rank_loss(transport, lambda: on_root(transport, function))


def drop_lost(transport: Transport) -> None:
    """Continue without the lost ranks, and say so."""
    peers = transport.peers
    gone = names(transport.drop_lost(), peers)
    if transport.rank == 0:
        logging.getLogger().setLevel(logging.WARNING)  # the other ranks are silent, and this may have been one
        _log.warning("%s died; %d ranks go on", gone, transport.size)
