"""The rounds of a run before it starts: who trains and is tested where, and which calls move how many bytes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from pflmpi import tree
from pflmpi.forecast.communication import Call
from pflmpi.messages.declared import Declared
from pflmpi.messages.groups import ClientGroup, clients_of
from pflmpi.messages.kinds import ClassMeans, Own, OwnClasses, Rows, Uplink
from pflmpi.runtime import evaluation, rounds
from pflmpi.runtime.rounds import Setup
from pflmpi.transports import ring

_NUMBER = 8  # bytes of a float64 or int64
_NEWS, _AGREED = 2, 2  # numbers that a rank reports after a round besides its scores, and that ranks agree on


@dataclass(frozen=True)
class RoundAhead:
    """What happens in a round.

    Attributes:
        round: counts from 1.
        participants: [P] ascending ids.
        assigned, testing: for each rank the groups that it trains and tests.
        receivers: for each rank the clients that the replies of this round are for; in round 1 also the first reply's.
        calls: of the round, in order; without those before it.
        up, down: bytes, as papers count them.
        wire_up, wire_down: bytes that the calls move to and from rank 0; round 1 has what moved before it, too.
    """

    round: int
    participants: np.ndarray
    assigned: list[list[ClientGroup]]
    testing: list[list[ClientGroup]]
    receivers: list[np.ndarray]
    calls: list[Call]
    up: int
    down: int
    wire_up: int
    wire_down: int


def rounds_ahead(ready: Setup, transport: Literal["inprocess", "mpi", "torch"]) -> Iterator[RoundAhead]:
    """Yield the rounds of a run from its first to its last, with messages moved by a transport."""
    training, n = ready.task.training, ready.task.num_clients
    changed, everyone = np.ones(n, bool), np.arange(n)
    before = up_calls(ready.declared, ready.placement.assign(everyone)) if ready.algorithm.introduces else []
    before += down_calls(ready.declared, ready.placement.assign(rounds._receivers(ready, 0)))
    for round in range(1, training.rounds + 1):
        participants = training.participants(ready.task.seed, round, n)
        assigned = ready.placement.assign(participants)
        receiving = ready.placement.assign(rounds._receivers(ready, round))
        changed[participants] = True
        due = round % ready.evaluation.every == 0 or round == training.rounds
        testing = evaluation.assign(
            ready.placement, ready.num_test, rounds._to_test(ready, changed) if due else np.empty(0, np.int64)
        )
        if due:
            changed[:] = False
        data = [*up_calls(ready.declared, assigned), *down_calls(ready.declared, receiving)]
        news = tuple(_NUMBER * (_NEWS + len(clients_of(groups))) for groups in testing)
        agreed = (_NUMBER * _AGREED,) * ready.placement.ranks
        introduced = ready.declared.up_bytes(everyone).sum() if round == 1 and ready.algorithm.introduces else 0
        moved = [*before, *data]
        yield RoundAhead(
            round,
            participants,
            assigned,
            testing,
            [clients_of(groups) for groups in receiving],
            [*data, Call("gather", news), Call("maximum", agreed)],
            up=int(ready.declared.up_bytes(participants).sum() + introduced),
            down=int(ready.declared.down_bytes(participants).sum()),
            wire_up=sum(_moved(call, transport) for call in moved if call.operation in ("maximum", "sum", "gather")),
            wire_down=sum(_moved(call, transport) for call in moved if call.operation in ("broadcast", "scatter")),
        )
        before = []


def up_calls(declared: Declared, assigned: list[list[ClientGroup]]) -> list[Call]:
    """Return the calls of `runtime.uplink.send_up` for the groups of participants of each rank."""
    folded = [kind for kind in declared.up.values() if not isinstance(kind, ClassMeans | Rows)]
    gathered: dict[str, Uplink] = {
        name: kind for name, kind in declared.up.items() if isinstance(kind, ClassMeans | Rows)
    }
    calls = []
    if folded:
        leaves = [leaf for kind in folded for _, leaf in tree.leaves(kind.like)]
        values = sum(leaf.numel() for leaf in leaves)
        calls.append(Call("maximum", (_NUMBER * len(leaves),) * len(assigned)))
        calls.append(Call("sum", (_NUMBER * values,) * len(assigned)))
    if gathered:
        each = replace(declared, up=gathered)  # a gathered message is exactly what is counted of it
        calls.append(Call("gather", tuple(int(each.up_bytes(clients_of(groups)).sum()) for groups in assigned)))
    return calls


def down_calls(declared: Declared, assigned: list[list[ClientGroup]]) -> list[Call]:
    """Return the calls of `runtime.downlink.send_down` for the groups of receivers of each rank."""
    own = [kind for kind in declared.down.values() if isinstance(kind, Own)]
    by_class = [kind for kind in declared.down.values() if isinstance(kind, OwnClasses)]
    shared = [kind for kind in declared.down.values() if not isinstance(kind, Own | OwnClasses)]
    calls = []
    if shared:
        calls.append(Call("broadcast", (sum(kind.client_bytes(0) for kind in shared),) * len(assigned)))
    if own or by_class:
        sizes = []
        for groups in assigned:
            clients = clients_of(groups)
            classes = int(declared.holds[clients].any(0).sum())
            rows = sum(len(clients) * kind.client_bytes(0) for kind in own)
            sizes.append(rows + sum(kind.client_bytes(classes) for kind in by_class))
        calls.append(Call("scatter", tuple(sizes)))
    return calls


def _moved(call: Call, transport: str) -> int:
    """Return the bytes that a transport counts for a call."""
    if call.operation == "sum" and transport == "torch":
        return ring.sum_bytes(call.sizes[0], len(call.sizes))
    return sum(call.sizes[1:])
