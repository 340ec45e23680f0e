"""The downlink: sends what the server publishes to the ranks of the receivers, each tree at most once to a rank."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from pflmpi import tree
from pflmpi.errors import RunError
from pflmpi.learning.task import HOST
from pflmpi.messages.declared import Declared
from pflmpi.messages.deliver import deliver, delivery_traffic
from pflmpi.messages.groups import ClientGroup, clients_of
from pflmpi.messages.kinds import NOBODY, Messages, Own, OwnClasses, tensor
from pflmpi.messages.packing import ALIGNED, pack, to_numpy, unpack, unpack_there
from pflmpi.messages.traffic import Traffic
from pflmpi.transports.base import Transport
from pflmpi.tree import Tree

KeptRows = Callable[[str, Tree, np.ndarray], Tree]


@dataclass(frozen=True)
class Homes:
    """Where the rows that clients keep are stored, and how they are read.

    Attributes:
        home: [N] the rank of each client; None if clients keep nothing.
        rows: reads rows [m, ...], from the name of a message, its template and ascending ids of clients of this rank.
    """

    home: np.ndarray | None
    rows: KeptRows


@dataclass(frozen=True)
class OwnRows:
    """A message of which each client gets rows of its own.

    Attributes:
        clients: [m] ascending ids of the receivers here.
        places: [m, ...] which of `rows` each receiver gets; -1 for zeros.
        rows: the rows that this rank received, [U, ...].
        whose: [m, M] ids of the clients that keep these rows, as a part of the message; None for rows of the server.
    """

    clients: np.ndarray
    places: np.ndarray
    rows: Tree
    whose: np.ndarray | None = None

    def for_clients(self, clients: np.ndarray) -> Tree:
        """Returns the message of the given clients, with a leading client axis."""
        assert np.isin(clients, self.clients).all(), "a message was not sent to one of the clients"
        receivers = np.searchsorted(self.clients, clients)
        places = self.places[receivers]
        filled = places != -1
        index: Tree = {"to": torch.from_numpy(np.flatnonzero(filled)), "from": torch.from_numpy(places[filled])}
        index = tree.to(index, next(leaf.device for _, leaf in tree.leaves(self.rows)))  # without synchronisation

        def take(leaf: torch.Tensor) -> torch.Tensor:
            rows = leaf.index_select(0, tree.leaf(index, "from"))
            if not filled.all():
                rows = leaf.new_zeros(places.size, *leaf.shape[1:]).index_copy_(0, tree.leaf(index, "to"), rows)
            return rows.view(*places.shape, *leaf.shape[1:])

        message = tree.map(take, self.rows)
        return message if self.whose is None else {"clients": torch.from_numpy(self.whose[receivers]), **message}


@dataclass(frozen=True)
class Reply:
    """The messages that a rank has received from the server, for the clients that it computes."""

    shared: Messages = field(default_factory=dict)  # the same for all clients
    own: dict[str, OwnRows] = field(default_factory=dict)  # rows of each receiver here, on the host
    by_class: dict[str, OwnRows] = field(default_factory=dict)  # rows of the classes that each receiver here holds

    def on(self, device: torch.device) -> "Reply":
        """Returns the reply with all but `own` on a device, to be copied there once a round."""
        rows: Tree = {name: message.rows for name, message in self.by_class.items()}
        common: Tree = {"shared": {**self.shared}, "by_class": rows}
        common = tree.to_host(common) if device.type == "cpu" else tree.to(common, device)
        shared, rows = tree.part(common, "shared"), tree.part(common, "by_class")
        by_class = {name: replace(message, rows=tree.part(rows, name)) for name, message in self.by_class.items()}
        return Reply(shared, self.own, by_class)  # type: ignore[arg-type]

    def for_clients(self, clients: np.ndarray, names: Collection[str] | None = None) -> Messages:
        """Returns the messages of the given clients with a leading client axis: those named, or all."""
        down: Messages = {
            name: tree.map(lambda leaf: leaf.expand(len(clients), *leaf.shape), value)
            for name, value in self.shared.items()
            if names is None or name in names
        }
        own = {**self.own, **self.by_class}.items()
        return down | {name: rows.for_clients(clients) for name, rows in own if names is None or name in names}


def send_down(
    transport: Transport,
    declared: Declared,
    published: Messages | None,
    assigned: list[list[ClientGroup]],
    device: torch.device = HOST,
    homes: Homes | None = None,
) -> Reply:
    """Sends what was published to the ranks of the receivers.

    Args:
        published: on rank 0, what `publish` returned for all receivers in ascending order; None elsewhere.
        assigned: the groups of receivers of each rank.
        device: of this rank, for shared messages.
        homes: of the rows that clients keep; None omits the messages made of them.

    Raises:
        RunError: a message that was not declared, differs from its declaration, or is missing.
    """
    receivers = [clients_of(groups) for groups in assigned]
    clients, everyone = receivers[transport.rank], np.sort(np.concatenate(receivers))
    if published is not None:
        declared.check_down(published, len(everyone))
    shared, own, by_class = _by_kind(declared)
    received, rows, class_rows = Tree(), Tree(), Tree()
    with transport.counting():
        if shared:
            whole: Tree | None = None if published is None else {name: published[name] for name in shared}
            received = broadcast_tree(transport, whole, shared, device)
        if own:
            rows = _from_server(transport, _receiver_positions(receivers), published, own)
        if by_class:
            class_rows = _from_server(transport, _held_classes(declared, receivers), published, by_class)
        others = {} if homes is None else _send_kept(transport, declared, published, receivers, homes)
    positions = np.cumsum(declared.holds[clients].any(0)) - 1  # of each class that a receiver here holds
    class_places = np.where(declared.holds[clients], positions, -1)
    return Reply(
        received,  # type: ignore[arg-type]
        {**{name: OwnRows(clients, np.arange(len(clients)), tree.part(rows, name)) for name in rows}, **others},
        {name: OwnRows(clients, class_places, tree.part(class_rows, name)) for name in class_rows},
    )


def broadcast_tree(transport: Transport, value: Tree | None, like: Tree, device: torch.device) -> Tree:
    """Broadcasts a tree from rank 0 onto every rank's device; on the host, rank 0 gets its own leaves back, read-only.

    Args:
        value: on rank 0, the tree; None elsewhere.
        device: of this rank; other ranks may have devices of another kind.
    """
    size = tree.num_bytes(like)
    if device.type == "cpu":
        if value is None:
            buffer = np.empty(size, np.uint8)
            transport.broadcast(buffer)
            return unpack(buffer, like)
        if transport.size > 1:
            transport.broadcast(pack(value))
        return tree.map(_align, value)
    direct = transport.takes_gpu_memory(size)
    if direct and value is None:
        there = torch.empty(size, dtype=torch.uint8, device=device)
        transport.broadcast(there)
        return unpack_there(there, like)
    # torch keeps pinned memory for the next round, and gives it out again once a copy from it has ended.
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    if value is not None:
        pinned.numpy()[:] = pack(value)
    if not direct:
        transport.broadcast(pinned.numpy())
    there = pinned.to(device, non_blocking=True)
    if direct:
        transport.broadcast(there)
    return unpack_there(there, like)


def _align(leaf: torch.Tensor) -> torch.Tensor:
    """Returns a leaf contiguous and aligned as `unpack` does, since kernels choose by that; copied only if needed."""
    leaf = leaf.detach().contiguous()
    return leaf if leaf.data_ptr() % ALIGNED == 0 else leaf.clone()


def send_answers(
    transport: Transport, declared: Declared, answers: Messages | None, assigned: list[list[ClientGroup]]
) -> Messages:
    """Sends the answers; returns those [m, ...] to the participants here, in ascending order.

    Args:
        answers: on rank 0, [P, ...] to all participants in ascending order; None elsewhere.
        assigned: the groups of participants of each rank.

    Raises:
        RunError: an answer that was not declared, differs from its declaration, or is missing.
    """
    places = _receiver_positions([clients_of(groups) for groups in assigned])
    if answers is not None:
        declared.check_answers(answers, sum(map(len, places)))
    like: Tree = {name: kind.like for name, kind in declared.answers.items()}
    with transport.counting():
        return _from_server(transport, places, answers, like)  # type: ignore[return-value]


def down_calls(declared: Declared, assigned: list[list[ClientGroup]], home: np.ndarray | None) -> list[Traffic]:
    """Returns the transport calls of `send_down`; for rows of other clients an upper bound.

    Args:
        assigned: the groups of receivers of each rank.
        home: [N] the rank of each client; None if clients keep nothing.
    """
    receivers, (shared, own, by_class) = [clients_of(groups) for groups in assigned], _by_kind(declared)
    calls = [Traffic.broadcast(tree.num_bytes(shared), len(assigned))] if shared else []
    for like, wanted in ((own, _receiver_positions(receivers)), (by_class, _held_classes(declared, receivers))):
        if like:
            calls.append(delivery_traffic(wanted, _home_on_server(wanted), like))
    for kind in declared.of_clients.values() if any(map(len, receivers)) else ():
        assert home is not None, "clients that keep rows have a home"
        ids = tree.leaf(kind.like, "clients").nbytes * sum(map(len, receivers))
        calls.append(Traffic.broadcast(ids, len(receivers)))
        calls.append(delivery_traffic(_most_senders(kind, receivers, home), home, _kept_row_template(kind)))
    return calls


def answer_calls(declared: Declared, assigned: list[list[ClientGroup]]) -> list[Traffic]:
    """Returns the transport calls of `send_answers`."""
    wanted = _receiver_positions([clients_of(groups) for groups in assigned])
    return [
        delivery_traffic(wanted, _home_on_server(wanted), {name: kind.like for name, kind in declared.answers.items()})
    ]


def _by_kind(declared: Declared) -> tuple[Tree, Tree, Tree]:
    """Returns the templates of shared messages, of those with rows of clients, and of those with rows of classes.

    Messages made of rows that clients keep are not among them.
    """
    shared, own, by_class = Tree(), Tree(), Tree()
    for name, kind in declared.published.items():
        if isinstance(kind, OwnClasses):
            by_class[name] = kind.like
        elif not isinstance(kind, Own):
            shared[name] = kind.like
        elif not kind.of:
            own[name] = kind.like
    return shared, own, by_class


def _receiver_positions(receivers: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns, for each rank, the positions of its receivers among all receivers."""
    everyone = np.sort(np.concatenate(receivers))
    return [np.searchsorted(everyone, clients) for clients in receivers]


def _held_classes(declared: Declared, receivers: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns, for each rank, the classes that at least one of its receivers holds."""
    return [np.flatnonzero(declared.holds[clients].any(0)) for clients in receivers]


def _home_on_server(wanted: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the home of rows that are all on rank 0."""
    return np.zeros(1 + max((int(numbers[-1]) for numbers in wanted if len(numbers)), default=0), np.int64)


def _from_server(transport: Transport, wanted: Sequence[np.ndarray], messages: Messages | None, like: Tree) -> Tree:
    """Delivers rows [U, ...] of the messages of rank 0; see `deliver`."""

    def rows(numbers: np.ndarray) -> Tree:
        assert messages is not None, "they live on rank 0"
        return _take_rows({name: messages[name] for name in like}, numbers)

    return deliver(transport, wanted, _home_on_server(wanted), rows, like)


def _send_kept(
    transport: Transport,
    declared: Declared,
    published: Messages | None,
    receivers: Sequence[np.ndarray],
    homes: Homes,
) -> dict[str, OwnRows]:
    """Sends every receiver the rows kept by the clients that the server chose for it; returns those for this rank."""
    everyone, messages = np.sort(np.concatenate(receivers)), dict[str, OwnRows]()
    for name, kind in declared.of_clients.items() if len(everyone) else ():
        assert homes.home is not None, "clients that keep rows have a home"
        whose = np.empty((len(everyone), len(tree.leaf(kind.like, "clients"))), np.int64)
        if published is not None:
            whose[:] = to_numpy(tree.leaf(published[name], "clients"))
            _check_clients(name, whose, len(homes.home))
        transport.broadcast(whose.reshape(-1).view(np.uint8))
        chosen = [whose[np.searchsorted(everyone, clients)] for clients in receivers]
        wanted = [np.unique(ids[ids != NOBODY]) for ids in chosen]
        like = _kept_row_template(kind)

        def rows_here(ids: np.ndarray, of: str = kind.of, like: Tree = like) -> Tree:
            return {of: homes.rows(of, tree.part(like, of), ids)}

        rows = deliver(transport, wanted, homes.home, rows_here, like)
        ids = chosen[transport.rank]
        places = np.where(ids == NOBODY, -1, np.searchsorted(wanted[transport.rank], ids))
        messages[name] = OwnRows(receivers[transport.rank], places, rows, ids)
    return messages


def _kept_row_template(kind: Own) -> Tree:
    """Returns the template of the row that one client keeps, under its name."""
    return {kind.of: tree.map(lambda rows: tensor(*rows.shape[1:], dtype=rows.dtype), tree.part(kind.like, kind.of))}


def _most_senders(kind: Own, receivers: Sequence[np.ndarray], home: np.ndarray) -> list[np.ndarray]:
    """Returns, for each rank, as many clients of other ranks as its receivers may be sent rows of, spread evenly."""
    count, wanted = len(tree.leaf(kind.like, "clients")), []
    for rank, clients in enumerate(receivers):
        away = np.flatnonzero(home != rank) if len(clients) else home[:0]
        number = min(len(clients) * count, len(away))
        wanted.append(away[np.arange(number) * len(away) // max(number, 1)])
    return wanted


def _check_clients(name: str, ids: np.ndarray, clients: int) -> None:
    if invalid := ids[(ids < NOBODY) | (ids >= clients)].tolist():
        raise RunError(
            f"the algorithm chose client {invalid[0]} for its message {name!r}; allowed are 0 to {clients - 1}, and "
            f"NOBODY ({NOBODY})"
        )


def _take_rows(value: Tree, rows: np.ndarray) -> Tree:
    """Takes ascending rows of each leaf; consecutive ones are a view, so that the result must not be modified."""
    if len(rows) and rows[-1] - rows[0] < len(rows):
        first, last = int(rows[0]), int(rows[-1])
        return tree.map(lambda leaf: leaf[first : last + 1], value)
    chosen = torch.from_numpy(rows)
    return tree.map(lambda leaf: leaf.index_select(0, chosen), value)
