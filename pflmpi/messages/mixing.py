"""Models are compared and mixed leaf by leaf, each on the rank that owns the leaf; the weights come from rank 0."""

import numpy as np
import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.errors import RunError
from pflmpi.messages.groups import ClientGroup
from pflmpi.messages.kinds import Messages, tensor
from pflmpi.messages.leaf_owners import LeafOwners
from pflmpi.messages.packing import NOTHING, numpy_type, to_numpy
from pflmpi.transports.base import Transport

Received = dict[int, np.ndarray]  # by rank, what its participants have of the leaves that this rank owns


def inner_products(rows: Tensor, from_first: bool) -> Tensor:
    """Inner products [P, P] (float64) of the rows [P, ...] of a leaf, less the first row where asked for."""
    flat = tree.flat_rows(rows).double()
    if from_first:
        flat = flat - flat[:1]
    return flat @ flat.mT


def weighted_sums(weights: Tensor, rows: Tensor) -> Tensor:
    """Weights [Q, P] (float64) times rows [P, ...]: [Q, ...] of the type of the rows."""
    return (weights @ tree.flat_rows(rows).double()).to(rows.dtype).view(len(weights), *rows.shape[1:])


def compare(
    transport: Transport, owners: LeafOwners, ups: list[tuple[ClientGroup, Messages]]
) -> tuple[Received, Messages]:
    """What this rank receives as an owner; on rank 0 the inner products [P, P], each in the place of its leaf.

    Args:
        ups: for each group computed here, the clients and their messages with a leading client axis.
    """
    rank = transport.rank
    with transport.channel("data"):
        received = transport.all_to_all(_sent(owners, ups, rank), owners.rows.received_by(rank), owners.rows.moved)
        products = [NOTHING]
        for leaf in owners.owned[rank]:
            kind = owners.compared[owners.entries.paths[leaf].split("/")[0]]
            products.append(_bytes(inner_products(_rows(owners, received, rank, leaf), kind.from_first)))
        parts = [np.concatenate(products)]
        if any(owners.product_sizes[1:]):
            parts = transport.gather(parts[0], owners.product_sizes) or []
    if rank != 0:
        return received, {}
    found, square = {}, (len(owners.participants),) * 2
    for leaves, part in zip(owners.owned, parts, strict=False):  # one part where rank 0 owns all
        for leaf, product in zip(leaves, part.view(np.float64).reshape(-1, *square), strict=True):
            found[owners.entries.paths[leaf]] = torch.from_numpy(product.copy())
    return received, tree.unflatten(found)  # type: ignore[return-value]


def mix(transport: Transport, owners: LeafOwners, received: Received, weights: Messages) -> Messages:
    """The answers [m, ...] to the participants here, in ascending order; `{}` where there are none.

    Args:
        received: from `compare`; emptied, because it is large.
        weights: on rank 0, for each leaf of the answers [P, P] (float64), a row for each participant.

    Raises:
        RunError: there are other weights than declared.
    """
    rank, square = transport.rank, (len(owners.participants),) * 2
    parts = _weights(owners, weights) if rank == 0 else None
    with transport.channel("data"):
        if any(owners.weight_sizes[1:]):
            mine = transport.scatter(parts, owners.weight_sizes[rank])
        else:
            mine = parts[0] if parts else NOTHING
        answers = {other: np.empty(size, np.uint8) for other, size in owners.answers.sent_by(rank).items()}
        at = 0  # bytes of one row
        for (_, leaf), each in zip(owners.answered[rank], mine.view(np.float64).reshape(-1, *square), strict=True):
            mixed = to_numpy(weighted_sums(torch.from_numpy(each.copy()), _rows(owners, received, rank, leaf)))
            size, kind = int(owners.bytes[leaf]), numpy_type(owners.entries.like[leaf])
            for other, part in answers.items():
                places = owners.places[other]
                _block(part, len(places), at, size).view(kind)[:] = mixed[places]
            at += size
        received.clear()
        answered = transport.all_to_all(answers, owners.answers.received_by(rank), owners.answers.moved, answers=True)
    return _unpacked(owners, answered, len(owners.clients[rank]))


def _sent(owners: LeafOwners, ups: list[tuple[ClientGroup, Messages]], rank: int) -> dict[int, np.ndarray]:
    """What each owner gets: leaf after leaf, the rows of the participants here."""
    clients = owners.clients[rank]
    groups = [
        (np.searchsorted(clients, ids), dict(tree.leaves({name: messages[name] for name in owners.compared})))
        for ids, messages in ups
    ]
    parts = {owner: np.empty(size, np.uint8) for owner, size in owners.rows.sent_by(rank).items()}
    for owner, part in parts.items():
        at = 0
        for leaf in owners.owned[owner]:
            size = int(owners.bytes[leaf])
            for places, values in groups:
                rows = to_numpy(tree.flat_rows(values[owners.entries.paths[leaf]]))
                _block(part, len(clients), at, size)[places] = rows.view(np.uint8)
            at += size
    return parts


def _rows(owners: LeafOwners, received: Received, rank: int, leaf: int) -> Tensor:
    """The rows [P, n] (float64) of a leaf that a rank owns: at once, so that they are not in memory in both types."""
    like, size = owners.entries.like[leaf], int(owners.bytes[leaf])
    before = sum(int(owners.bytes[each]) for each in owners.owned[rank] if each < leaf)
    rows = np.empty((len(owners.participants), like.numel()))
    for other, part in received.items():
        places = owners.places[other]
        rows[places] = _block(part, len(places), before, size).view(numpy_type(like))
    return torch.from_numpy(rows)


def _weights(owners: LeafOwners, weights: Messages) -> list[np.ndarray]:
    """What each owner gets: the weights of its answers, one after the other."""
    square = tensor(*(len(owners.participants),) * 2, dtype=torch.float64)
    expected = {name: tree.map(lambda _: square, kind.like) for name, kind in owners.mixed.items()}
    if wrong := tree.differences(dict(weights), dict(expected)):
        raise RunError(
            "the algorithm's `mixing_weights` is not what it declares as `Mixed` (found against declared): "
            f"{'; '.join(wrong)}; return [P, P] float64 for each of their leaves"
        )
    found = {path: _bytes(leaf) for path, leaf in tree.leaves(dict(weights))}
    return [np.concatenate([found[path] for path, _ in each]) if each else NOTHING for each in owners.answered]


def _unpacked(owners: LeafOwners, answered: Received, count: int) -> Messages:
    """The answers to `count` participants, from what each owner has sent."""
    found = {}
    for owner, part in answered.items():
        at = 0
        for path, leaf in owners.answered[owner]:
            like, size = owners.entries.like[leaf], int(owners.bytes[leaf])
            values = _block(part, count, at, size).copy().view(numpy_type(like))
            found[path], at = torch.from_numpy(values).reshape(count, *like.shape), at + size
    return tree.unflatten(found)  # type: ignore[return-value]


def _block(part: np.ndarray, rows: int, at: int, size: int) -> np.ndarray:
    """Rows [rows, size] of a leaf in a part, which has leaf after leaf; `at` bytes of a row are before it."""
    return part[rows * at : rows * (at + size)].reshape(rows, size)


def _bytes(values: Tensor) -> np.ndarray:
    return to_numpy(values).reshape(-1).view(np.uint8)
