"""Ranks that were started apart become one group of torch.distributed: in a store that rank 0 opens for them."""

import json
import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed does not declare them

from pflmpi.errors import TransportError
from pflmpi.transports.base import Transport
from pflmpi.transports.detect import Launch
from pflmpi.transports.start.spawn import keep_to_this_machine
from pflmpi.transports.torch_store import listen, open_store
from pflmpi.transports.torchdist import TorchTransport
from pflmpi.transports.waiting import TimeIsUp, within

PATIENCE = 20.0  # seconds for those who were called to come
_FORMED = 60.0  # seconds for the group to form, which takes a moment unless one of them is gone
_AGAIN = 0.05  # seconds between two looks into the store
_HERE = "127.0.0.1"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rendezvous:
    """Where ranks meet (the rendezvous of torch.distributed).

    Attributes:
        store: hosted by rank 0.
        address: of the store.
    """

    store: Store
    address: str

    def arrived(self, tokens: Sequence[str], patience: float) -> set[str]:
        """Those of the called processes that come in time."""
        end, there = time.monotonic() + patience, set[str]()
        while len(there) < len(tokens) and time.monotonic() < end:
            time.sleep(_AGAIN)
            there |= {token for token in tokens if token not in there and self.store.check([f"here/{token}"])}
        return there

    def admit(self, tokens: Sequence[str], before: int) -> None:
        """Tell processes that have come that they are the ranks after those that there were before."""
        self.store.set("admitted", json.dumps([list(tokens), before]))

    def attend(self, token: str, patience: float) -> tuple[int, int, int]:
        """Come when called: this process's rank, the number of ranks, and how many there were before.

        Raises:
            TransportError: nobody has waited.
        """
        try:
            self.store.set(f"here/{token}", "")
            self.store.wait(["admitted"], timedelta(seconds=patience))
            tokens, before = json.loads(self.store.get("admitted"))
            return before + tokens.index(token), before + len(tokens), before
        except (RuntimeError, ValueError) as error:
            raise TransportError("the run went on without this process; join again") from error

    def form(self, rank: int, size: int, before: int, timeout: float, old: Transport | None = None) -> Transport:
        """The group of all ranks; if it does not form, that of the ranks before.

        Args:
            rank, size: of the new group.
            before: how many ranks there were.
            timeout: of the transport.
            old: of the ranks before.

        Raises:
            TransportError: neither, or this rank is not of those before.
        """
        kept = old
        if old is not None:
            old.barrier()  # no rank leaves while another still reads from it
            kept = old.disband() if isinstance(old, TorchTransport) else old
        keep_to_this_machine(self.address.startswith(_HERE))
        limit = min(_FORMED, timeout)
        group = _try(PrefixStore("all", self.store), rank, size, limit, kept)
        if group is None and old is None:
            raise TransportError("the ranks could not connect to each other; the run goes on without those that join")
        if group is None and kept is old:
            assert old is not None
            return old
        if group is None:  # some may have noticed it later than others
            group = _try(PrefixStore("before", self.store), rank, before, 3 * limit, kept)
        if group is None:
            raise TransportError("the ranks could not connect to each other again; `pflmpi resume` continues")
        group.timeout = timeout
        return group


def create(hosts: Sequence[str]) -> Rendezvous:
    """A rendezvous hosted by this process; those on other hosts reach it unless all are on one."""
    host = socket.gethostname() if len(set(hosts)) > 1 else _HERE
    listening = listen(host, 0)
    port = listening.getsockname()[1]
    return Rendezvous(open_store(host, port, listening, PATIENCE), f"{host}:{port}")


def connect(address: str, patience: float) -> Rendezvous:
    """The rendezvous at an address; raises `TransportError` if it cannot be reached."""
    host, _, port = address.rpartition(":")
    try:
        return Rendezvous(within(patience, lambda: open_store(host, int(port), None, patience)), address)
    except (RuntimeError, TimeIsUp) as error:
        raise TransportError(
            f"{address}, where the ranks meet, cannot be reached from {socket.gethostname()}; host names "
            "must stand for addresses that all ranks reach, through any firewall"
        ) from error


def _try(place: Store, rank: int, size: int, limit: float, kept: Transport | None) -> TorchTransport | None:
    """A group of the ranks if it forms on all of them, else None on all of them; rank 0 decides."""
    group = None
    try:
        group = TorchTransport(Launch("torchrun", rank, size), limit, place, kept)
        group.barrier()
        place.set(f"formed/{rank}", "")
        if rank == 0:
            place.wait([f"formed/{other}" for other in range(size)], timedelta(seconds=limit))
            place.set("verdict", "yes")
    except (TransportError, RuntimeError) as error:
        _log.debug("rank %d: %s", rank, error)
        if rank == 0:
            place.set("verdict", "no")
    try:
        place.wait(["verdict"], timedelta(seconds=3 * limit))
    except RuntimeError as error:
        raise TransportError("rank 0 was lost while ranks joined; `pflmpi resume` continues") from error
    if place.get("verdict") == b"yes":
        assert group is not None, "rank 0 has heard of all"
        return group
    if group is not None:
        group.disband()
    return None
