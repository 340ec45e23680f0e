"""The way down: what was published reaches the ranks of the receivers, in one packed buffer of each kind."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from pflmpi import tree
from pflmpi.learning.task import HOST
from pflmpi.messages.arrival import broadcast
from pflmpi.messages.calls import Call
from pflmpi.messages.chosen import ChosenRows, Offers, send_chosen
from pflmpi.messages.declared import Declared
from pflmpi.messages.groups import ClientGroup, clients_of
from pflmpi.messages.kinds import Chosen, Messages, Mixed, OneOf, Own, OwnClasses, with_rows
from pflmpi.messages.one_of import OneOfRows, one_of_calls, send_one_of
from pflmpi.messages.packing import NOTHING, pack, unpack
from pflmpi.transports.base import Transport
from pflmpi.tree import Tree


@dataclass(frozen=True)
class Reply:
    """What a rank has received from the server, for the clients it computes."""

    shared: Messages = field(default_factory=dict)
    own: Messages = field(default_factory=dict)  # rows [m, ...] of `clients`
    by_class: Messages = field(default_factory=dict)  # [K, ...], zero where nobody here holds the class
    chosen: dict[str, ChosenRows] = field(default_factory=dict)
    one_of: dict[str, OneOfRows] = field(default_factory=dict)
    clients: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    holds: np.ndarray = field(default_factory=lambda: np.empty((0, 0), bool))

    def on(self, device: torch.device) -> "Reply":
        """The same with what the clients here have in common on a device, where it is sent once a round."""
        common: Tree = {"shared": {**self.shared}, "by_class": {**self.by_class}}
        common = tree.to_host(common) if device.type == "cpu" else tree.to(common, device)
        return replace(self, shared=tree.part(common, "shared"), by_class=tree.part(common, "by_class"))  # type: ignore[arg-type]

    def for_clients(self, clients: np.ndarray, names: Collection[str] | None = None) -> Messages:
        """The messages of the given clients with a leading client axis: those named, or all."""

        def wanted(messages: Messages) -> Messages:
            return {name: value for name, value in messages.items() if names is None or name in names}

        down: Messages = {
            name: tree.map(lambda leaf: leaf.expand(len(clients), *leaf.shape), value)
            for name, value in wanted(self.shared).items()
        }
        if own := wanted(self.own):
            assert np.isin(clients, self.clients).all(), "a message of its own was not sent to every client asked for"
            rows = torch.from_numpy(np.searchsorted(self.clients, clients))
            for name, value in own.items():
                down[name] = tree.map(lambda leaf: leaf.index_select(0, rows), value)
        picked: dict[str, ChosenRows | OneOfRows] = {**self.chosen, **self.one_of}
        for name, rows_of in picked.items():
            if names is None or name in names:
                down[name] = rows_of.for_clients(clients)
        if by_class := wanted(self.by_class):
            device = next(leaf.device for _, leaf in tree.leaves({**by_class}))
            held = tree.leaf(tree.to({"held": torch.from_numpy(self.holds[clients])}, device), "held")

            def rows_held(leaf: torch.Tensor) -> torch.Tensor:
                return torch.where(held.view(*held.shape, *[1] * (leaf.ndim - 1)), leaf, leaf.new_zeros(()))

            down |= {name: tree.map(rows_held, value) for name, value in by_class.items()}
        return down


def send_down(
    transport: Transport,
    declared: Declared,
    published: Messages | None,
    assigned: list[list[ClientGroup]],
    device: torch.device = HOST,
    offers: Offers | None = None,
) -> Reply:
    """Send what was published to the ranks of the receivers: Shared once, Own per client, OwnClasses per rank.

    What is `Chosen` comes from the ranks of the clients that offer it; `OneOf` see `one_of`.

    Args:
        published: on rank 0, what `publish` returned for all receivers in ascending order; None elsewhere.
        assigned: the groups of receivers of each rank.
        device: of this rank, to which what is shared comes.
        offers: of the clients here; None where nobody reads what is chosen.

    Raises:
        RunError: a message that was not declared, differs from its declaration, or is missing.
    """
    receivers = [clients_of(groups) for groups in assigned]
    everyone = np.sort(np.concatenate(receivers))
    if published is not None:
        declared.check_down(published, len(everyone))
    shared, own, by_class = _by_way(declared)
    received: Messages = {}
    if shared:
        packed = None if published is None else pack({name: published[name] for name in shared})
        with transport.channel("data"):
            received = broadcast(transport, packed, shared, device)  # type: ignore[assignment]

    mine: dict[str, Messages] = {"own": {}, "class": {}}
    if own or by_class:
        parts = None
        if published is not None:
            parts = []
            for clients in receivers:
                if not len(clients):
                    parts.append(NOTHING)
                    continue
                at, held = np.searchsorted(everyone, clients), _classes_of(declared, clients)
                content: Tree = {
                    "own": {name: _take(published[name], at) for name in own},
                    "class": {name: _take(published[name], held) for name in by_class},
                }
                parts.append(pack(content))
        template = _rows_template(declared, receivers[transport.rank])
        with transport.channel("data"):
            buffer = transport.scatter(parts, tree.num_bytes(template))
        mine.update(unpack(buffer, template))  # type: ignore[arg-type]

    clients = receivers[transport.rank]
    classes = _classes_of(declared, clients)
    full = {name: _spread(value, classes, declared.holds.shape[1]) for name, value in mine["class"].items()}
    one_of = send_one_of(transport, declared, published, receivers, everyone)
    chosen = {} if offers is None else send_chosen(transport, declared, published, receivers, offers)
    return Reply(received, mine["own"], full, chosen, one_of, clients, declared.holds)


def down_calls(declared: Declared, assigned: list[list[ClientGroup]]) -> list[Call]:
    """The collective calls of `send_down`, with the bytes of each rank."""
    shared, own, by_class = _by_way(declared)
    calls = []
    if shared:
        calls.append(Call("broadcast", (tree.num_bytes(shared),) * len(assigned)))
    if own or by_class:
        sizes = (tree.num_bytes(_rows_template(declared, clients_of(groups))) for groups in assigned)
        calls.append(Call("scatter", tuple(sizes)))
    return [*calls, *one_of_calls(declared, assigned)]


def _by_way(declared: Declared) -> tuple[Tree, Tree, Tree]:
    """The templates of what is the same for all, of each client, and of each class."""
    shared: Tree = {}
    own: Tree = {}
    by_class: Tree = {}
    for name, kind in sorted(declared.down.items()):
        if isinstance(kind, Mixed | Chosen | OneOf):  # which come otherwise
            continue
        way = own if isinstance(kind, Own) else by_class if isinstance(kind, OwnClasses) else shared
        way[name] = kind.like
    return shared, own, by_class


def _rows_template(declared: Declared, clients: np.ndarray) -> Tree:
    """The rows that a rank with these receivers gets."""
    _, own, by_class = _by_way(declared)
    return {"own": with_rows(own, len(clients)), "class": with_rows(by_class, len(_classes_of(declared, clients)))}


def _classes_of(declared: Declared, clients: np.ndarray) -> np.ndarray:
    """The classes that at least one of the clients holds."""
    return np.flatnonzero(declared.holds[clients].any(0))


def _take(value: Tree, rows: np.ndarray) -> Tree:
    """Some rows of each leaf, ascending; only to be read, as rows that follow each other are not copied."""
    if len(rows) and rows[-1] - rows[0] < len(rows):
        first, last = int(rows[0]), int(rows[-1])
        return tree.map(lambda leaf: leaf[first : last + 1], value)
    chosen = torch.from_numpy(rows)
    return tree.map(lambda leaf: leaf.index_select(0, chosen), value)


def _spread(rows: Tree, classes: np.ndarray, num_classes: int) -> Tree:
    at = torch.from_numpy(classes)
    return tree.map(
        lambda leaf: torch.zeros(num_classes, *leaf.shape[1:], dtype=leaf.dtype).index_copy_(0, at, leaf), rows
    )
