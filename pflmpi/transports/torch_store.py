"""Torch's key-value store: the rendezvous of ranks, and the number of calls that each has entered."""

import errno
import ipaddress
import os
import socket
import threading
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # torch.distributed does not declare them

from pflmpi.errors import ConfigError
from pflmpi.transports.detect import Launch
from pflmpi.transports.waiting import WaitTimeout, call_within

_INTERVAL = 1.0  # seconds between two updates; a shorter time limit cannot name the late ranks
_ANSWER_SECONDS = 3.0  # for the store to answer
_BACKLOG = 2048  # connections that wait to be accepted, because many ranks connect at once


def find_address(launch: Launch) -> str:
    """Returns the HOST:PORT at which the ranks meet."""
    return launch.address or f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def connect(launch: Launch, timeout: float) -> Store:
    """Connects to the store in which the ranks of this run meet, within `timeout` seconds.

    Under torchrun the store outlives a restart, and with it the addresses of dead processes, so each restart and each
    run has a prefix of its own. (Torch's own rendezvous does not separate them and fails after a restart, at least up
    to 2.15.)

    Raises:
        ConfigError: rank 0 cannot listen at the address, or its port is none.
    """
    host, _, port = find_address(launch).rpartition(":")
    try:
        if int(port) not in range(1, 65536):
            raise ValueError("ports are from 1 to 65535")
        listening = listen(host, int(port)) if launch.rank == 0 and is_hosted_by_rank_0() else None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the ranks cannot meet at {host}:{port} ({error}); MASTER_ADDR names the node of rank 0, MASTER_PORT a "
            "free port of it, the same on all ranks"
        ) from error
    return PrefixStore(f"pflmpi/{launch.restarts}/{launch.runs}", open_store(host, int(port), listening, timeout))


def open_store(host: str, port: int, listening: socket.socket | None, timeout: float) -> Store:
    """Opens the store at an address; this process hosts it if it has the listening socket."""
    return TCPStore(
        host,
        port,
        is_master=listening is not None,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listening.detach() if listening else None,
    )


def is_hosted_by_rank_0() -> bool:
    """Whether rank 0 hosts the store; under torchrun the agent does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def listen(host: str, port: int) -> socket.socket:
    """Opens a socket that listens only at the address that the ranks connect to.

    If the host name resolves to a loopback address (Debian's 127.0.1.1), or to one that this machine does not have
    (behind NAT), other nodes may resolve it differently; then the socket listens on all addresses.

    Args:
        port: 0 for any free port.

    Raises:
        OSError: the port is taken.
    """
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
        loopback = ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
        if loopback and host not in (address[0], "localhost"):
            continue
        try:
            return socket.create_server(address, family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=_BACKLOG)


class Arrivals:
    """Counts in the store how many calls each rank has entered, to name the ranks that are late.

    All ranks make the same calls, so a rank with a lower count has not arrived. If several have not, the others wait
    for the ones that are furthest behind. Collective calls cannot tell, because each rank waits for a neighbour, which
    may itself be waiting.
    """

    def __init__(self, store: Store, rank: int, size: int, hosted: bool) -> None:
        self._store = store.clone()  # the thread below must not share the main thread's connection
        self._hosted = hosted  # by rank 0
        self._rank = rank
        self._size = size
        self._number = 0
        self._closed = threading.Event()
        threading.Thread(target=self._write_counts, name="pflmpi-arrivals", daemon=True).start()

    def enter(self) -> None:
        self._number += 1

    def absent(self) -> list[int]:
        """The ranks that are furthest behind this rank's newest call; none if all have entered it."""
        try:
            return call_within(_ANSWER_SECONDS, self._find_latest)
        except (WaitTimeout, RuntimeError):  # torch's calls block forever if the store's process hangs
            return [0] if self._hosted else []

    def close(self) -> None:
        self._closed.set()

    def _find_latest(self) -> list[int]:
        counts = [self._number if rank == self._rank else self._read_count(rank) for rank in range(self._size)]
        lowest = min(counts)
        return [rank for rank, count in enumerate(counts) if count == lowest < self._number]

    def _read_count(self, rank: int) -> int:
        return int(self._store.get(f"call/{rank}")) if self._store.check([f"call/{rank}"]) else 0

    def _write_counts(self) -> None:
        written = 0
        while not self._closed.wait(_INTERVAL):
            number = self._number
            if number > written:
                try:
                    self._store.set(f"call/{self._rank}", str(number))
                except RuntimeError:  # rank 0 is gone; the call itself will report it
                    return
                written = number
