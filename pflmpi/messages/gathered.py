"""The bytes of gathered messages: a rank sends of each leaf the rows of all its clients, rank 0 orders those of all."""

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from pflmpi import tree
from pflmpi.messages.kinds import ClassMeans, Messages, Updates, Uplink, tensor, with_rows
from pflmpi.messages.packing import NOTHING, numpy_type, to_numpy
from pflmpi.tree import Tree

Kinds = Mapping[str, Uplink]  # of the messages, by name


def packed(holds: np.ndarray, kinds: Kinds, ups: Updates, clients: np.ndarray) -> np.ndarray:
    """The messages of the clients of a rank.

    Args:
        holds: [N, K] bool, who holds which classes.
        ups: of each group computed here, the clients and their messages with a leading client axis.
        clients: [m] ascending ids, of all groups.
    """
    counts = holds[clients].sum(1)
    like = _template(kinds, counts)
    part = np.empty(tree.num_bytes(like), np.uint8)
    sections = dict(_sections(part, like))
    for group, messages in ups:
        sent = {name: _sent(kind, messages[name], holds[group]) for name, kind in kinds.items()}
        rows = _rows(kinds, np.searchsorted(clients, group), counts)
        for path, leaf in tree.leaves({**sent}):
            sections[path][rows[path.split("/")[0]]] = to_numpy(leaf)
    return part


def unpacked(
    holds: np.ndarray, kinds: Kinds, buffers: list[np.ndarray], clients: list[np.ndarray], participants: np.ndarray
) -> Messages:
    """The messages of all ranks, in the order of the participants [P], for `ClassMeans` with the client of each row.

    Args:
        buffers: of each rank; dropped once read, so that whole models are here only once.
        clients: of each rank.
    """
    counts = holds[participants].sum(1)
    result = tree.map(lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype), _template(kinds, counts))
    whole = {path: to_numpy(leaf) for path, leaf in tree.leaves(result)}
    for rank, here in enumerate(clients):
        buffer, buffers[rank] = buffers[rank], NOTHING
        if not len(here):
            continue
        places = np.searchsorted(participants, here)
        rows = _rows(kinds, places, counts)
        for path, values in _sections(buffer, _template(kinds, counts[places])):
            whole[path][rows[path.split("/")[0]]] = values
    for name, kind in kinds.items():
        if isinstance(kind, ClassMeans):
            tree.part(result, name)["clients"] = torch.from_numpy(np.repeat(participants, counts))
    return {name: tree.part(result, name) for name in result}


def _template(kinds: Kinds, counts: np.ndarray) -> Tree:
    """What clients send that hold so many classes [m], leaf by leaf: a row of each, or of each class of each."""
    like: Tree = {}
    for name, kind in kinds.items():
        if isinstance(kind, ClassMeans):
            label = tensor(dtype=torch.int32)
            each: Tree = {"labels": label, "means": tensor(kind.num_features)}
            like[name] = with_rows({**each, "counts": label} if kind.counts else each, int(counts.sum()))
        else:
            like[name] = with_rows(kind.like, len(counts))
    return like


def _rows(kinds: Kinds, places: np.ndarray, counts: np.ndarray) -> dict[str, np.ndarray]:
    """Which rows of each message belong to the clients at some places among those that hold so many classes [m]."""
    chosen = np.zeros(len(counts), bool)
    chosen[places] = True
    by_class = np.flatnonzero(np.repeat(chosen, counts))
    return {name: by_class if isinstance(kind, ClassMeans) else places for name, kind in kinds.items()}


def _sent(kind: Uplink, message: Tree, holds: np.ndarray) -> Tree:
    """What the clients of a group send of a message [m, ...]; holds: [m, K]."""
    if not isinstance(kind, ClassMeans):
        return message
    held = torch.from_numpy(holds)
    names = ("means", "counts") if kind.counts else ("means",)
    labels = torch.from_numpy(np.nonzero(holds)[1].astype(np.int32))
    return {"labels": labels, **{name: tree.leaf(message, name)[held] for name in names}}


def _sections(buffer: np.ndarray, like: Tree) -> Iterator[tuple[str, np.ndarray]]:
    """The rows of each leaf in packed bytes; they may begin at an odd address."""
    offset = 0
    for path, leaf in tree.leaves(like):
        size = leaf.nbytes
        yield path, buffer[offset : offset + size].view(numpy_type(leaf)).reshape(leaf.shape)
        offset += size
    assert offset == len(buffer), f"buffer of {len(buffer)} bytes, template of {offset}"
