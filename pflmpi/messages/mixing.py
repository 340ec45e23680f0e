"""Models are compared and mixed leaf by leaf, each on the rank that owns the leaf; the weights come from rank 0."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.errors import RunError
from pflmpi.messages.kinds import Messages, Updates, tensor
from pflmpi.messages.leaf_owners import LeafOwners, WeightedSum
from pflmpi.messages.linear_algebra import inner_products, weighted_sums
from pflmpi.messages.packing import NOTHING, numpy_type, pack, to_numpy, unpack
from pflmpi.transports.base import Transport
from pflmpi.tree import Tree

Received = dict[int, np.ndarray]  # by rank, what it has of the leaves that this rank owns


def compare(transport: Transport, owners: LeafOwners, ups: Updates, server: Tree) -> tuple[Received, Messages]:
    """What this rank receives as an owner; on rank 0 the inner products [P + K, P + K], each in the place of its leaf.

    Args:
        ups: for each group computed here, the clients and their messages with a leading client axis.
        server: on rank 0, the state that has the centres.
    """
    rank = transport.rank
    with transport.channel("data"):
        sent = _sent(owners, ups, server, rank)
        received = transport.all_to_all(sent, owners.rows.received_by(rank), owners.rows.moved)
        products = [NOTHING]
        for leaf in owners.owned[rank]:
            kind = owners.compared[owners.entries.paths[leaf].split("/")[0]]
            products.append(_bytes(inner_products(_rows(owners, received, rank, leaf), kind.from_first)))
        parts = _gathered(transport, np.concatenate(products), owners.product_sizes)
    found, rows = {}, owners.compared_rows.tolist()
    for leaves, part in zip(owners.owned, parts, strict=False):  # no part on other ranks
        squares = [(rows[leaf], rows[leaf]) for leaf in leaves]
        for leaf, product in zip(leaves, _cut(part, squares), strict=True):
            found[owners.entries.paths[leaf]] = product
    return received, tree.unflatten(found)  # type: ignore[return-value]


def sum_centres(transport: Transport, owners: LeafOwners, received: Received, weights: Messages) -> Messages:
    """On rank 0 the weighted sums [K, ...] that take the place of the centres; `{}` on others.

    Args:
        received: from `compare`; emptied where there are no answers to mix of it.
        weights: on rank 0, for each leaf of the centres [K, P + K] (float64).
    """
    rank, sums = transport.rank, [NOTHING]
    with transport.channel("data"):
        for one, each in _weights(transport, owners, owners.summed, weights):
            found = to_numpy(weighted_sums(each, _rows(owners, received, rank, one.leaf)))
            sums.append(found.astype(numpy_type(owners.entries.like[one.leaf])).reshape(-1).view(np.uint8))
        if not owners.mixed:
            received.clear()
        parts = _gathered(transport, np.concatenate(sums), owners.centre_bytes.tolist())
    result = dict[str, Tensor]()
    for made, part in zip(owners.summed, parts, strict=False):  # no part on other ranks
        if made:
            likes = [(one, owners.entries.like[one.leaf]) for one in made]
            like = {one.path: tensor(one.rows, *leaf.shape, dtype=leaf.dtype) for one, leaf in likes}
            result |= dict(tree.leaves(unpack(part, tree.unflatten(like))))
    return tree.unflatten(result)  # type: ignore[return-value]


def mix(transport: Transport, owners: LeafOwners, received: Received, weights: Messages) -> Messages:
    """The answers [m, ...] to the participants here, in ascending order; `{}` where there are none.

    Args:
        received: from `compare`; emptied, because it is large.
        weights: on rank 0, for each leaf of the answers [P, P + K] (float64), a row for each participant.
    """
    rank = transport.rank
    with transport.channel("data"):
        answers = {other: np.empty(size, np.uint8) for other, size in owners.answers.sent_by(rank).items()}
        at = 0  # bytes of one row
        for one, each in _weights(transport, owners, owners.answered, weights):
            mixed = to_numpy(weighted_sums(each, _rows(owners, received, rank, one.leaf)))
            size, kind = int(owners.bytes[one.leaf]), numpy_type(owners.entries.like[one.leaf])
            for other, part in answers.items():
                places = owners.places[other]
                _block(part, len(places), at, size).view(kind)[:] = mixed[places]
            at += size
        received.clear()
        answered = transport.all_to_all(answers, owners.answers.received_by(rank), owners.answers.moved, answers=True)
    return _unpacked(owners, answered, len(owners.clients[rank]))


def check_weights(owners: LeafOwners, weights: Messages) -> None:
    """Raise `RunError` unless the weights are those of what is made."""
    made = [one for each in (*owners.answered, *owners.summed) for one in each]
    shapes = {one.path: tensor(one.rows, int(owners.compared_rows[one.leaf]), dtype=torch.float64) for one in made}
    if wrong := tree.differences(dict(weights), tree.unflatten(shapes)):
        raise RunError(
            "the algorithm's `mixing_weights` is not what it declares as `Mixed` or `Centres` (found against "
            f"declared): {'; '.join(wrong)}; return float64 for each of their leaves, [P, P] or, of centres, [K, P + K]"
        )


def _sent(owners: LeafOwners, ups: Updates, server: Tree, rank: int) -> dict[int, np.ndarray]:
    """What each owner gets: leaf after leaf, the rows of the participants here, and then those of the server."""
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
        if rank == 0 and owners.centre_bytes[owner]:
            own = {one.path: tree.at(server, one.path) for one in owners.summed[owner]}
            part[len(clients) * at :] = pack(tree.unflatten(own))
    return parts


def _rows(owners: LeafOwners, received: Received, rank: int, leaf: int) -> Tensor:
    """The rows [P + K, n] (float64) of a leaf that a rank owns: at once, so as not to be in memory in both types."""
    like, size = owners.entries.like[leaf], int(owners.bytes[leaf])
    before = sum(int(owners.bytes[each]) for each in owners.owned[rank] if each < leaf)
    rows = np.empty((int(owners.compared_rows[leaf]), like.numel()))
    for other, places in owners.places.items():
        rows[places] = _block(received[other], len(places), before, size).view(numpy_type(like))
    at = len(owners.clients[0]) * int(owners.row_bytes[rank])
    for one in owners.summed[rank]:
        if one.leaf == leaf:
            rows[-one.rows :] = received[0][at : at + one.rows * size].view(numpy_type(like)).reshape(one.rows, -1)
        at += one.rows * int(owners.bytes[one.leaf])
    return torch.from_numpy(rows)


def _weights(
    transport: Transport, owners: LeafOwners, made: list[list[WeightedSum]], weights: Messages
) -> Iterator[tuple[WeightedSum, Tensor]]:
    """What this rank makes, each with its weights, which rank 0 has of all."""
    rank, sizes = transport.rank, owners.weight_sizes(made)
    parts = None
    if rank == 0:
        found = {path: _bytes(leaf) for path, leaf in tree.leaves(dict(weights))}
        parts = [np.concatenate([found[one.path] for one in each]) if each else NOTHING for each in made]
    alone = parts[0] if parts else NOTHING
    mine = transport.scatter(parts, sizes[rank]) if any(sizes[1:]) else alone
    shapes = [(one.rows, int(owners.compared_rows[one.leaf])) for one in made[rank]]
    yield from zip(made[rank], _cut(mine, shapes), strict=True)


def _gathered(transport: Transport, part: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    """On rank 0 the parts of all ranks, or its own where others have none; nothing on these."""
    if any(sizes[1:]):
        return transport.gather(part, sizes) or []
    return [part] if transport.rank == 0 else []


def _cut(part: np.ndarray, shapes: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
    """The matrices (float64) of a part, one after the other."""
    numbers, at = part.view(np.float64), 0
    for rows, columns in shapes:
        yield torch.from_numpy(numbers[at : at + rows * columns].copy()).reshape(rows, columns)
        at += rows * columns


def _unpacked(owners: LeafOwners, answered: Received, count: int) -> Messages:
    """The answers to `count` participants, from what each owner has sent."""
    found = {}
    for owner, part in answered.items():
        at = 0
        for one in owners.answered[owner]:
            like, size = owners.entries.like[one.leaf], int(owners.bytes[one.leaf])
            values = _block(part, count, at, size).copy().view(numpy_type(like))
            found[one.path], at = torch.from_numpy(values).reshape(count, *like.shape), at + size
    return tree.unflatten(found)  # type: ignore[return-value]


def _block(part: np.ndarray, rows: int, at: int, size: int) -> np.ndarray:
    """Rows [rows, size] of a leaf in a part, which has leaf after leaf; `at` bytes of a row are before it."""
    return part[rows * at : rows * (at + size)].reshape(rows, size)


def _bytes(values: Tensor) -> np.ndarray:
    return to_numpy(values).reshape(-1).view(np.uint8)
