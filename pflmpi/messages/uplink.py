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
    Messages,
    Rows,
    Sum,
    Uplink,
    tensor,
)
from pflmpi.messages.packing import pack, unpack
from pflmpi.messages.routes import Route, route
from pflmpi.transports.base import Transport
from pflmpi.tree import Tree


def send_up(
    transport: Transport,
    declared: Declared,
    ups: list[tuple[ClientGroup, Messages]],
    assigned: list[list[ClientGroup]],
) -> Messages | None:
    """Fold the participants' messages on rank 0, in client order; None on the other ranks.

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
        else:
            folded[name] = kind
    way = route(Entries.of(folded), assigned)
    return folded, dict(sorted(declared.up.items())) if folded and way.way == "gather" else gathered, way


def _gathered_bytes(declared: Declared, gathered: dict[str, Uplink], assigned: list[list[ClientGroup]]) -> list[int]:
    """What each rank sends: of a gathered message exactly the logical bytes."""
    only = replace(declared, up=gathered)
    return [int(only.up_bytes(clients_of(groups)).sum()) for groups in assigned]


def _gather(
    transport: Transport,
    declared: Declared,
    kinds: dict[str, Uplink],
    ups: list[tuple[ClientGroup, Messages]],
    assigned: list[list[ClientGroup]],
    participants: np.ndarray,
) -> Messages | None:
    position = {int(client): (messages, i) for clients, messages in ups for i, client in enumerate(clients)}
    own = [
        _client_message(kinds, position[int(client)][0], position[int(client)][1], declared.holds[client])
        for client in clients_of(assigned[transport.rank])
    ]
    sizes = _gathered_bytes(declared, kinds, assigned)
    part = np.concatenate([pack(value) for value in own]) if own else np.empty(0, np.uint8)
    assert len(part) == sizes[transport.rank], "an uplink is not what was declared"
    with transport.channel("data"):
        buffers = transport.gather(part, sizes)
    if buffers is None:
        return None
    messages: dict[int, Tree] = {}
    for groups, buffer in zip(assigned, buffers, strict=True):
        offset = 0
        for client in clients_of(groups):
            template = _client_template(kinds, declared.holds[client])
            size = tree.num_bytes(template)
            messages[int(client)] = unpack(buffer[offset : offset + size], template)
            offset += size
    ordered = [messages[int(client)] for client in participants]
    result: Messages = {}
    for name, kind in kinds.items():
        values: list[Tree] = [value[name] for value in ordered]  # type: ignore[misc]
        if isinstance(kind, ClassMeans):
            joined = tree.map(lambda *leaves: torch.cat(leaves), values[0], *values[1:])
            held = declared.holds[participants].sum(1)
            result[name] = {**joined, "clients": torch.from_numpy(np.repeat(participants, held))}
        else:
            result[name] = tree.stack(values)
    return result


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
