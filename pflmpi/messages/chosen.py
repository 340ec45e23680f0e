"""What clients offer goes to those for whom the server chooses it: from where it lives, once to each rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pflmpi import tree
from pflmpi.errors import RunError
from pflmpi.messages.calls import Call
from pflmpi.messages.declared import Declared
from pflmpi.messages.kinds import NOBODY, Chosen, Messages, with_rows
from pflmpi.messages.packing import pack, to_numpy, unpack
from pflmpi.transports.base import Transport
from pflmpi.tree import Tree

OfferedRows = Callable[[str, Tree, np.ndarray], Tree]


@dataclass(frozen=True)
class Offers:
    """What clients offer, and where it is.

    Attributes:
        home: [N] the rank of each client; None where they keep nothing.
        rows: from the name of a message, its template and ascending ids of clients that live here, their rows [m, ...].
    """

    home: np.ndarray | None
    rows: OfferedRows


@dataclass(frozen=True)
class ChosenRows:
    """What a rank has received for its clients.

    Attributes:
        of: name of what is offered.
        clients: [m] ascending ids.
        chosen: [m, M] ids of those whose offers they get.
        known: [U] `NOBODY`, and then the ascending ids of them all.
        rows: their offers, [U, ...]; zeros for `NOBODY`.
    """

    of: str
    clients: np.ndarray
    chosen: np.ndarray
    known: np.ndarray
    rows: Tree

    def for_clients(self, clients: np.ndarray) -> Tree:
        """The message of the given clients with a leading client axis."""
        chosen = self.chosen[np.searchsorted(self.clients, clients)]
        places = torch.from_numpy(np.searchsorted(self.known, chosen))
        return {"clients": torch.from_numpy(chosen), self.of: tree.map(lambda leaf: leaf[places], self.rows)}


@dataclass(frozen=True)
class _Journeys:
    """What travels: the offer of client `who[j]` from rank `source[j]` to `target[j]`; by target, then by client."""

    source: np.ndarray
    target: np.ndarray
    who: np.ndarray

    @classmethod
    def of(cls, chosen: np.ndarray, ranks: np.ndarray, home: np.ndarray) -> "_Journeys":
        """Those to receivers on the given ranks [R], for whom there are chosen [R, M]."""
        wanted = ranks[:, np.newaxis] * len(home) + chosen
        target, who = np.divmod(np.unique(wanted[chosen != NOBODY]), len(home))
        return cls(home[who], target, who)

    def parts(self, ends: np.ndarray, others: np.ndarray, rank: int) -> dict[int, np.ndarray]:
        """Ids by the rank at the other end, of the journeys that have a rank at one."""
        here = ends == rank
        return {int(other): self.who[here & (others == other)] for other in np.unique(others[here])}


def send_chosen(
    transport: Transport,
    declared: Declared,
    published: Messages | None,
    receivers: Sequence[np.ndarray],
    offers: Offers,
) -> dict[str, ChosenRows]:
    """What the receivers here get, by name.

    Args:
        published: on rank 0, what `publish` returned for all receivers in ascending order; None elsewhere.
        receivers: of each rank, ascending.

    Raises:
        RunError: the server chose somebody who is no client.
    """
    everyone, home = np.concatenate(receivers), offers.home
    if not declared.chosen or not len(everyone):
        return {}
    assert home is not None, "clients that offer something keep it where they live"
    ranks = np.repeat(np.arange(len(receivers)), [len(clients) for clients in receivers])[np.argsort(everyone)]
    found = {}
    for name, kind in sorted(declared.chosen.items()):
        chosen = np.empty((len(everyone), _count(kind)), np.int64)
        if published is not None:
            chosen[:] = to_numpy(tree.leaf(published[name], "clients"))
            _check(name, chosen, len(home))
        with transport.channel("data"):
            transport.broadcast(chosen.reshape(-1).view(np.uint8))
            known, rows = _fetched(transport, kind, _Journeys.of(chosen, ranks, home), offers)
        mine = np.searchsorted(np.sort(everyone), receivers[transport.rank])
        found[name] = ChosenRows(kind.of, receivers[transport.rank], chosen[mine], known, rows)
    return found


def chosen_calls(declared: Declared, receivers: Sequence[np.ndarray], home: np.ndarray | None) -> list[Call]:
    """The collective calls of `send_chosen`, with the bytes of each rank: at most, as if all chosen lived elsewhere.

    Ranks receive no more; what each sends is taken to go by the number of its clients.
    """
    calls: list[Call] = []
    counts = np.array([len(clients) for clients in receivers], np.int64)
    for _, kind in sorted(declared.chosen.items()) if counts.any() else ():
        assert home is not None, "clients that offer something keep it where they live"
        living = np.bincount(home, minlength=len(counts))
        away, size = len(home) - living, tree.num_bytes(kind.offer)
        received = size * np.minimum(counts * _count(kind), away)
        shares = received / np.maximum(away, 1)  # of each client elsewhere
        sent = np.ceil(living * (shares.sum() - shares)).astype(np.int64)
        ids = 8 * _count(kind) * int(counts.sum())
        calls.append(Call("broadcast", (ids,) * len(counts)))
        calls.append(Call("all-to-all", tuple(sent.tolist()), tuple(received.tolist()), answers=True))
    return calls


def _fetched(transport: Transport, kind: Chosen, journeys: _Journeys, offers: Offers) -> tuple[np.ndarray, Tree]:
    """`NOBODY` and the ids whose offers arrive here, [U], and these offers, [U, ...]."""
    rank, offer = transport.rank, kind.offer
    size = tree.num_bytes(offer)
    packed: dict[bytes, np.ndarray] = {}  # ranks that want the same share the memory
    sent = {}
    for other, who in journeys.parts(journeys.source, journeys.target, rank).items():
        key = who.tobytes()
        if key not in packed:
            packed[key] = pack(offers.rows(kind.of, offer, who))
        sent[other] = packed[key]
    expected = journeys.parts(journeys.target, journeys.source, rank)
    sizes = {other: size * len(who) for other, who in expected.items()}
    received: dict[int, np.ndarray] = {}
    if len(journeys.who):
        moved = size * int(np.count_nonzero(journeys.source != journeys.target))
        received = transport.all_to_all(sent, sizes, moved, answers=True)
    known = np.concatenate([[NOBODY], journeys.who[journeys.target == rank]])
    rows = tree.map(lambda leaf: torch.zeros(len(known), *leaf.shape, dtype=leaf.dtype), offer)
    for other, who in expected.items():
        places = torch.from_numpy(np.searchsorted(known, who))
        arrived = unpack(received.pop(other), with_rows(offer, len(who)))
        tree.map(lambda all, some, at=places: all.index_copy_(0, at, some), rows, arrived)
    return known, rows


def _count(kind: Chosen) -> int:
    return tree.leaf(kind.like, "clients").shape[0]


def _check(name: str, chosen: np.ndarray, clients: int) -> None:
    if wrong := chosen[(chosen < NOBODY) | (chosen >= clients)].tolist():
        raise RunError(
            f"the algorithm chose client {wrong[0]} for its message {name!r}; allowed are 0 to {clients - 1}, and "
            f"NOBODY ({NOBODY})"
        )
