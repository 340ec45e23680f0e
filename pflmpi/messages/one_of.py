"""One of a few trees goes to each client: the trees to each rank once, with which of them each client there gets."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pflmpi import tree
from pflmpi.errors import RunError
from pflmpi.messages.calls import Call
from pflmpi.messages.declared import Declared
from pflmpi.messages.groups import ClientGroup, clients_per_rank
from pflmpi.messages.kinds import Messages, OneOf
from pflmpi.messages.packing import NOTHING, pack, unpack
from pflmpi.transports.base import Transport
from pflmpi.tree import Tree


@dataclass(frozen=True)
class OneOfRows:
    """What a rank has received for its clients.

    Attributes:
        clients: [m] ascending ids.
        chosen: [m] int64, which of the choices each gets.
        choices: [c, ...], on the host.
    """

    clients: np.ndarray
    chosen: torch.Tensor
    choices: Tree

    def for_clients(self, clients: np.ndarray) -> Tree:
        """The message of the given clients with a leading client axis."""
        return chosen_rows(self.choices, self.chosen[torch.from_numpy(np.searchsorted(self.clients, clients))])


def chosen_rows(choices: Tree, chosen: torch.Tensor) -> Tree:
    """The rows [m, ...] of some choices [c, ...], by their numbers [m]."""
    return tree.map(lambda leaf: leaf.index_select(0, chosen), choices)


def send_one_of(
    transport: Transport,
    declared: Declared,
    published: Messages | None,
    receivers: Sequence[np.ndarray],
    everyone: np.ndarray,
) -> dict[str, OneOfRows]:
    """What the receivers here get, by name.

    Args:
        published: on rank 0, what `publish` returned for all receivers in ascending order; None elsewhere.
        receivers: of each rank, ascending.
        everyone: all of them, ascending.

    Raises:
        RunError: the server chose a tree that is not there.
    """
    mine, found = receivers[transport.rank], {}
    for name, kind in sorted(declared.one_of.items()) if len(everyone) else ():
        if published is not None:
            _check(name, tree.leaf(published[name], "chosen"), kind.count)
        with transport.channel("data"):
            if _all_travel(kind, np.fromiter(map(len, receivers), np.int64)):
                like = kind.published(kind.count, len(everyone))
                buffer = np.empty(tree.num_bytes(like), np.uint8) if published is None else pack(published[name])
                transport.broadcast(buffer)
                here = unpack(buffer, like)
                chosen = tree.leaf(here, "chosen")[torch.from_numpy(np.searchsorted(everyone, mine))]
            else:
                parts = None
                if published is not None:
                    parts = [_part(published[name], np.searchsorted(everyone, clients)) for clients in receivers]
                like = kind.published(min(len(mine), kind.count), len(mine))
                here = unpack(transport.scatter(parts, tree.num_bytes(like)), like)
                chosen = tree.leaf(here, "chosen")
        found[name] = OneOfRows(mine, chosen, tree.part(here, "choices"))
    return found


def one_of_calls(declared: Declared, assigned: Sequence[Sequence[ClientGroup]]) -> list[Call]:
    """The collective calls of `send_one_of`, with the bytes of each rank; `assigned`: each rank's receivers."""
    calls: list[Call] = []
    for _, kind in sorted(declared.one_of.items()) if any(assigned) else ():
        counts = clients_per_rank(assigned)
        if _all_travel(kind, counts):
            size = tree.num_bytes(kind.published(kind.count, int(counts.sum())))
            calls.append(Call("broadcast", (size,) * len(counts)))
        else:
            sizes = (tree.num_bytes(kind.published(min(count, kind.count), count)) for count in counts.tolist())
            calls.append(Call("scatter", tuple(sizes)))
    return calls


def _all_travel(kind: OneOf, counts: np.ndarray) -> bool:
    """Whether all choices go from rank to rank, which is less for rank 0 than what each of the others needs.

    It sends them as often as a binomial tree has levels. counts: [R] receivers of each rank.
    """
    others = counts[1:]
    return bool(np.minimum(others, kind.count).sum() > kind.count * len(others).bit_length())


def _part(published: Tree, places: np.ndarray) -> np.ndarray:
    """What a rank gets for receivers at some places: all choices, or, for fewer receivers, one for each."""
    if not len(places):
        return NOTHING
    choices, chosen = tree.part(published, "choices"), tree.leaf(published, "chosen")[torch.from_numpy(places)]
    if len(places) < len(next(leaf for _, leaf in tree.leaves(choices))):
        choices = chosen_rows(choices, chosen)
        chosen = torch.arange(len(places))
    return pack({"choices": choices, "chosen": chosen})


def _check(name: str, chosen: torch.Tensor, count: int) -> None:
    if wrong := chosen[(chosen < 0) | (chosen >= count)].tolist():
        raise RunError(f"the algorithm chose {wrong[0]} of its message {name!r}; allowed are 0 to {count - 1}")
