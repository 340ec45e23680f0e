"""The uplink: the participants' messages are folded exactly in slices, or gathered on rank 0 in client order."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch

from pflmpi import tree
from pflmpi.learning.task import HOST
from pflmpi.messages.declared import Declared
from pflmpi.messages.device_sum import OnDevice
from pflmpi.messages.exact import OnHost
from pflmpi.messages.fold import Fold
from pflmpi.messages.groups import ClientGroup, clients_of, clients_of_all, clients_per_rank, rank_by_rank
from pflmpi.messages.kinds import ClassMeans, Messages, Updates, Uplink, tensor, with_rows
from pflmpi.messages.packing import NOTHING, numpy_type, to_numpy
from pflmpi.messages.slices import Slices, cut_slices
from pflmpi.messages.traffic import Traffic
from pflmpi.transports.base import Transport
from pflmpi.tree import Tree

Kinds = Mapping[str, Uplink]  # of the gathered messages, by name


def send_up(
    transport: Transport,
    declared: Declared,
    ups: Updates,
    assigned: list[list[ClientGroup]],
    device: torch.device = HOST,
) -> Messages | None:
    """Fold or gather the participants' messages on rank 0, in client order; None on other ranks.

    Args:
        ups: for each group computed here, the clients and their messages with a leading client axis; those that are
            folded may be on a GPU.
        assigned: the groups of participants of each rank.
        device: of this rank, where what is folded is added.

    Raises:
        RunError: a message that was not declared, differs from its declaration, or is missing.
    """
    for clients, messages in ups:
        declared.check_up(messages, len(clients))
    here = clients_of(assigned[transport.rank])
    kinds, holds = declared.gathered, declared.holds

    def pack(part: np.ndarray) -> None:
        if len(part):
            _write(dict(_sections(part, _template(kinds, holds[here].sum(1)))), holds, kinds, ups, here)

    with transport.channel("data"):
        adds = OnHost() if device.type == "cpu" else OnDevice(device)
        folded, packed = Fold(declared, up_slices(declared, assigned), assigned, adds).over(transport, ups, pack)
    if folded is None or not kinds:
        return folded
    return {**folded, **_gathered(holds, kinds, ups, packed, assigned)}


def up_calls(declared: Declared, assigned: list[list[ClientGroup]]) -> list[Traffic]:
    """The calls of `send_up`."""
    return up_slices(declared, assigned).calls


def up_slices(declared: Declared, assigned: list[list[ClientGroup]]) -> Slices:
    """The slices of what is folded; of a gathered message a rank sends exactly its bytes."""
    gathered = replace(declared, up=declared.gathered)
    before = np.cumsum([0, *gathered.returned_bytes(rank_by_rank(assigned))])
    sizes = np.diff(before[np.cumsum([0, *clients_per_rank(assigned)])])
    return cut_slices(declared.entries, assigned, sizes)


def _write(
    sections: Mapping[str, np.ndarray], holds: np.ndarray, kinds: Kinds, ups: Updates, clients: np.ndarray
) -> None:
    """Write the messages of the clients of this rank to their places among some clients.

    Args:
        sections: by path, the rows of all these clients.
        holds: [N, K] bool, who holds which classes.
        clients: ascending ids.
    """
    counts = holds[clients].sum(1)
    for group, messages in ups:
        sent = {name: _sent(kind, messages[name], holds[group]) for name, kind in kinds.items()}
        rows = _rows(kinds, np.searchsorted(clients, group), counts)
        for path, leaf in tree.leaves({**sent}):
            sections[path][rows[path.split("/")[0]]] = to_numpy(leaf)


def _gathered(
    holds: np.ndarray, kinds: Kinds, ups: Updates, packed: list[np.ndarray], assigned: list[list[ClientGroup]]
) -> Messages:
    """The messages of all ranks, in the order of the participants [P], for `ClassMeans` with the client of each row.

    Args:
        ups: those of rank 0.
        packed: by the other ranks; dropped once read, so that whole models are here only once.
    """
    participants = clients_of_all(assigned)
    counts = holds[participants].sum(1)
    result = tree.map(lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype), _template(kinds, counts))
    whole = {path: to_numpy(leaf) for path, leaf in tree.leaves(result)}
    _write(whole, holds, kinds, ups, participants)
    for rank, groups in enumerate(assigned):
        buffer, packed[rank] = packed[rank], NOTHING
        if not len(buffer):
            continue
        places = np.searchsorted(participants, clients_of(groups))
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
            row: Tree = {"labels": label, "means": tensor(kind.num_features)}
            like[name] = with_rows({**row, "counts": label} if kind.counts else row, int(counts.sum()))
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
