"""The way up: the participants' messages are folded exactly, or gathered in client order."""

from dataclasses import replace

import numpy as np

from pflmpi.messages import gathered
from pflmpi.messages.calls import Call
from pflmpi.messages.declared import Declared
from pflmpi.messages.folding.fold import Fold
from pflmpi.messages.folding.routes import Route, route
from pflmpi.messages.groups import ClientGroup, clients_of, clients_of_all, clients_per_rank, rank_by_rank
from pflmpi.messages.kinds import Messages, Sum, Updates, Uplink
from pflmpi.transports.base import Transport


def send_up(
    transport: Transport,
    declared: Declared,
    ups: Updates,
    assigned: list[list[ClientGroup]],
) -> Messages | None:
    """Fold the participants' messages on rank 0, in client order; None on other ranks.

    Args:
        ups: for each group computed here, the clients and their messages with a leading client axis; those that are
            folded may be on a GPU.
        assigned: the groups of participants of each rank.

    Raises:
        RunError: a message that was not declared, differs from its declaration, or is missing.
    """
    participants = clients_of_all(assigned)
    for clients, messages in ups:
        declared.check_up(messages, len(clients))
    folded, kept, way = _by_way(declared, assigned)
    result: Messages = {}
    fold = Fold(declared, folded, way, assigned)
    if folded and way.way != "gather":
        result.update(fold.over(transport, ups) or {})
    if kept:
        result.update(_gather(transport, declared, kept, ups, assigned, participants) or {})
    if transport.rank != 0:
        return None
    if folded and way.way == "gather":
        result.update(fold.over(transport, [(participants, result)]) or {})
    return result


def up_calls(declared: Declared, assigned: list[list[ClientGroup]]) -> list[Call]:
    """The collective calls of `send_up`, with the bytes of each rank."""
    folded, kept, way = _by_way(declared, assigned)
    calls = way.calls if folded else []
    if kept:
        calls.append(Call("gather", tuple(_gathered_bytes(declared, kept, assigned))))
    return calls


def _by_way(declared: Declared, assigned: list[list[ClientGroup]]) -> tuple[dict[str, Sum], dict[str, Uplink], Route]:
    """The messages that are folded, those that are gathered, and the way of the former, which may be to be gathered."""
    folded, kept = declared.folded, declared.gathered
    way = route(declared.entries, assigned)
    return folded, dict(sorted({**folded, **kept}.items())) if way.way == "gather" else kept, way


def _gathered_bytes(declared: Declared, kinds: dict[str, Uplink], assigned: list[list[ClientGroup]]) -> list[int]:
    """What each rank sends: of a gathered message exactly the logical bytes."""
    before = np.cumsum([0, *replace(declared, up=kinds).up_bytes(rank_by_rank(assigned))])
    sizes: list[int] = np.diff(before[np.cumsum([0, *clients_per_rank(assigned)])]).tolist()
    return sizes


def _gather(
    transport: Transport,
    declared: Declared,
    kinds: dict[str, Uplink],
    ups: Updates,
    assigned: list[list[ClientGroup]],
    participants: np.ndarray,
) -> Messages | None:
    sizes = _gathered_bytes(declared, kinds, assigned)
    with transport.channel("data"):
        part = gathered.packed(declared.holds, kinds, ups, clients_of(assigned[transport.rank]))
        buffers = transport.gather(part, sizes)
    if buffers is None:
        return None
    return gathered.unpacked(declared.holds, kinds, buffers, list(map(clients_of, assigned)), participants)
