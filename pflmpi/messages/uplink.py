"""The way up: the participants' messages are folded exactly, or gathered in client order."""

from dataclasses import replace

import numpy as np
import torch

from pflmpi import tree
from pflmpi.messages.declared import Declared
from pflmpi.messages.entries import Entries
from pflmpi.messages.folding import Fold
from pflmpi.messages.groups import ClientGroup, clients_of
from pflmpi.messages.kinds import (
    Call,
    ClassMeans,
    Compared,
    Messages,
    Rows,
    Sum,
    Uplink,
    tensor,
    with_rows,
)
from pflmpi.messages.packing import NOTHING, pack, unpack
from pflmpi.messages.routes import Route, route
from pflmpi.transports.base import Transport
from pflmpi.tree import Tree


def send_up(
    transport: Transport,
    declared: Declared,
    ups: list[tuple[ClientGroup, Messages]],
    assigned: list[list[ClientGroup]],
) -> Messages | None:
    """Fold the participants' messages on rank 0, in client order, but those that are compared; None on other ranks.

    Args:
        ups: for each group computed here, the clients and their messages with a leading client axis.
        assigned: the groups of participants of each rank.

    Raises:
        RunError: a message that was not declared, differs from its declaration, or is missing.
    """
    participants = np.sort(np.concatenate([clients_of(groups) for groups in assigned]))
    for clients, messages in ups:
        declared.check_up(messages, len(clients))
    folded, gathered, way = _by_way(declared, assigned)
    result: Messages = {}
    fold = Fold(declared, folded, way, assigned)
    if folded and way.way != "gather":
        result.update(fold.over(transport, ups) or {})
    if gathered:
        result.update(_gather(transport, declared, gathered, ups, assigned, participants) or {})
    if transport.rank != 0:
        return None
    if folded and way.way == "gather":
        result.update(fold.over(transport, [(participants, result)]) or {})
    return result


def up_calls(declared: Declared, assigned: list[list[ClientGroup]]) -> list[Call]:
    """The collective calls of `send_up`, with the bytes of each rank."""
    folded, gathered, way = _by_way(declared, assigned)
    calls = way.calls if folded else []
    if gathered:
        calls.append(Call("gather", tuple(_gathered_bytes(declared, gathered, assigned))))
    return calls


def _by_way(declared: Declared, assigned: list[list[ClientGroup]]) -> tuple[dict[str, Sum], dict[str, Uplink], Route]:
    """The messages that are folded, those that are gathered, and the way of the former, which may be to be gathered."""
    folded: dict[str, Sum] = {}
    gathered: dict[str, Uplink] = {}
    for name, kind in sorted(declared.up.items()):
        if isinstance(kind, ClassMeans | Rows):
            gathered[name] = kind
        elif not isinstance(kind, Compared):
            folded[name] = kind
    way = route(Entries.of(folded), assigned)
    return folded, dict(sorted({**folded, **gathered}.items())) if way.way == "gather" else gathered, way


def _gathered_bytes(declared: Declared, gathered: dict[str, Uplink], assigned: list[list[ClientGroup]]) -> list[int]:
    """What each rank sends: of a gathered message exactly the logical bytes."""
    clients = [clients_of(groups) for groups in assigned]
    before = np.cumsum([0, *replace(declared, up=gathered).up_bytes(np.concatenate(clients))])
    sizes: list[int] = np.diff(before[np.cumsum([0, *map(len, clients)])]).tolist()
    return sizes


def _gather(
    transport: Transport,
    declared: Declared,
    kinds: dict[str, Uplink],
    ups: list[tuple[ClientGroup, Messages]],
    assigned: list[list[ClientGroup]],
    participants: np.ndarray,
) -> Messages | None:
    sizes = _gathered_bytes(declared, kinds, assigned)
    with transport.channel("data"):
        buffers = transport.gather(_packed(declared, kinds, ups, clients_of(assigned[transport.rank])), sizes)
    return None if buffers is None else _in_client_order(declared, kinds, buffers, assigned, participants)


def _packed(
    declared: Declared, kinds: dict[str, Uplink], ups: list[tuple[ClientGroup, Messages]], clients: np.ndarray
) -> np.ndarray:
    """The messages of the clients here [m], one after the other."""
    position = {int(client): (messages, row) for group, messages in ups for row, client in enumerate(group)}
    part, at = np.empty(int(replace(declared, up=kinds).up_bytes(clients).sum()), np.uint8), 0
    for client in clients.tolist():
        packed = pack(_client_message(kinds, *position[client], declared.holds[client]))
        part[at : at + len(packed)] = packed
        at += len(packed)
    assert at == len(part), "an uplink is not what was declared"
    return part


def _in_client_order(
    declared: Declared,
    kinds: dict[str, Uplink],
    buffers: list[np.ndarray],
    assigned: list[list[ClientGroup]],
    participants: np.ndarray,
) -> Messages:
    """The messages of all ranks; a buffer is dropped once it is read, so that whole models are here only once."""
    rows: Messages = {}
    classes: dict[str, list[Tree]] = {}  # by participant
    for name, kind in kinds.items():
        if isinstance(kind, ClassMeans):
            classes[name] = [{} for _ in participants]
        else:
            like = with_rows(kind.like, len(participants))
            rows[name] = tree.map(lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype), like)
    for rank, groups in enumerate(assigned):
        buffer, buffers[rank], at = buffers[rank], NOTHING, 0
        for client in clients_of(groups):
            template, row = _client_template(kinds, declared.holds[client]), int(np.searchsorted(participants, client))
            size = tree.num_bytes(template)
            message = unpack(buffer[at : at + size], template)
            at += size
            for name in rows:
                for (_, leaf), (_, value) in zip(
                    tree.leaves(rows[name]), tree.leaves(tree.part(message, name)), strict=True
                ):
                    leaf[row] = value
            for name, found in classes.items():
                found[row] = tree.part(message, name)
    owners = torch.from_numpy(np.repeat(participants, declared.holds[participants].sum(1)))
    for name, found in classes.items():
        rows[name] = {**tree.map(lambda *leaves: torch.cat(leaves), found[0], *found[1:]), "clients": owners}
    return rows


def _client_message(kinds: dict[str, Uplink], messages: Messages, row: int, holds: np.ndarray) -> Tree:
    result: Tree = {}
    held = torch.from_numpy(np.flatnonzero(holds))
    for name, kind in kinds.items():
        value = tree.map(lambda leaf: leaf[row], messages[name])
        if isinstance(kind, ClassMeans):
            names = ("means", "counts") if kind.counts else ("means",)
            value = {"labels": held.to(torch.int32), **{key: value[key].index_select(0, held) for key in names}}  # type: ignore[union-attr]
        result[name] = value
    return result


def _client_template(kinds: dict[str, Uplink], holds: np.ndarray) -> Tree:
    result: Tree = {}
    for name, kind in kinds.items():
        if isinstance(kind, ClassMeans):
            count = int(holds.sum())
            like: Tree = {
                "labels": tensor(count, dtype=torch.int32),
                "means": tensor(count, kind.num_features),
            }
            if kind.counts:
                like["counts"] = tensor(count, dtype=torch.int32)
            result[name] = like
        else:
            result[name] = kind.like
    return result
