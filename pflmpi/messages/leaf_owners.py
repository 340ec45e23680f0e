"""Which rank owns which leaf of the models that are compared and mixed, and what travels then: a pure function.

Each leaf is whole on one rank, because sums over parts of it have other bits; no rank has all leaves of all
participants, unless these are too small for that to be worth a message.
"""

import heapq
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pflmpi.messages.all_to_all import AllToAll
from pflmpi.messages.declared import Declared
from pflmpi.messages.entries import Entries
from pflmpi.messages.groups import ClientGroup, clients_of
from pflmpi.messages.kinds import Call, Compared, Mixed

_PRODUCT = 8  # bytes of a float64
_LEAST = 2**18  # bytes of all rows that are worth another owner


@dataclass(frozen=True)
class LeafOwners:
    """What is compared and mixed in a round, and where.

    Attributes:
        compared: messages of the participants, by name.
        mixed: the answers, by name.
        clients: of each rank, the ascending ids of its participants.
    """

    compared: dict[str, Compared]
    mixed: dict[str, Mixed]
    clients: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, declared: Declared, assigned: list[list[ClientGroup]]) -> "LeafOwners":
        """Those of a round, none where nothing is compared; `assigned` are the groups of participants of each rank."""
        if not declared.compared or not any(assigned):
            return cls({}, {}, ())
        return cls(declared.compared, declared.mixed, tuple(clients_of(groups) for groups in assigned))

    @cached_property
    def entries(self) -> Entries:
        """The leaves that are compared."""
        return Entries.of(self.compared)

    @cached_property
    def participants(self) -> np.ndarray:
        """[P] ascending ids."""
        return np.sort(np.concatenate(self.clients))

    @cached_property
    def places(self) -> dict[int, np.ndarray]:
        """Of each rank that has any, the positions of its participants among all."""
        there = ((rank, clients) for rank, clients in enumerate(self.clients) if len(clients))
        return {rank: np.searchsorted(self.participants, clients) for rank, clients in there}

    @cached_property
    def bytes(self) -> np.ndarray:
        """[M] bytes of one row of each leaf."""
        return np.array([leaf.numel() * leaf.element_size() for leaf in self.entries.like], np.int64)

    @cached_property
    def owned(self) -> list[list[int]]:
        """Of each rank the leaves, ascending: the largest first to the rank that has the least, the server last."""
        found: list[list[int]] = [[] for _ in self.clients]
        counts = self.counts.tolist()
        worth = int(self.bytes.sum()) * len(self.participants) // _LEAST
        order = sorted(range(len(counts)), key=lambda rank: (rank == 0, -counts[rank]))
        owners = order[: min(worth, len(self.bytes))] if worth > 1 else [0]
        loads = [(0, place) for place in range(len(owners))]
        for leaf in np.argsort(-self.bytes, kind="stable").tolist():
            load, place = loads[0]
            heapq.heapreplace(loads, (load + int(self.bytes[leaf]), place))
            found[owners[place]].append(leaf)
        return [sorted(leaves) for leaves in found]

    @cached_property
    def answered(self) -> list[list[tuple[str, int]]]:
        """Of each rank the paths of the answers that it mixes, ascending, each with the leaf that it is mixed from."""
        paths = self.entries.paths
        owner = {leaf: rank for rank, leaves in enumerate(self.owned) for leaf in leaves}
        found: list[list[tuple[str, int]]] = [[] for _ in self.clients]
        for name, kind in sorted(self.mixed.items()):
            for leaf, path in enumerate(paths):
                if path.startswith(f"{kind.of}/"):
                    found[owner[leaf]].append((name + path[len(kind.of) :], leaf))
        return found

    @cached_property
    def counts(self) -> np.ndarray:
        """[R] participants of each rank."""
        return np.array([len(clients) for clients in self.clients], np.int64)

    @cached_property
    def row_bytes(self) -> np.ndarray:
        """[R] bytes of one row of the leaves that each rank owns."""
        return self._row_bytes(self.owned)

    @cached_property
    def answer_bytes(self) -> np.ndarray:
        """[R] bytes of one row of the answers that each rank mixes."""
        return self._row_bytes([[leaf for _, leaf in answers] for answers in self.answered])

    def _row_bytes(self, leaves: list[list[int]]) -> np.ndarray:
        return np.array([int(self.bytes[each].sum()) if each else 0 for each in leaves], np.int64)

    @cached_property
    def rows(self) -> AllToAll:
        """Bytes that each rank sends to each owner."""
        return AllToAll(((self.counts, self.row_bytes),))

    @cached_property
    def answers(self) -> AllToAll:
        """Bytes that each owner sends to each rank."""
        return AllToAll(((self.answer_bytes, self.counts),))

    def memory(self, rank: int) -> int:
        """Bytes that a rank needs as an owner: all rows, their answers, and one leaf of both as float64."""
        if not self.compared:
            return 0
        largest = max((int(self.bytes[leaf]) for leaf in self.owned[rank]), default=0)
        return len(self.participants) * (int(self.row_bytes[rank] + self.answer_bytes[rank]) + 4 * largest)

    @cached_property
    def product_sizes(self) -> list[int]:
        """[R] bytes of the inner products that rank 0 gathers."""
        return [_PRODUCT * len(self.participants) ** 2 * len(leaves) for leaves in self.owned]

    @cached_property
    def weight_sizes(self) -> list[int]:
        """[R] bytes of the weights that rank 0 scatters."""
        return [_PRODUCT * len(self.participants) ** 2 * len(leaves) for leaves in self.answered]

    @property
    def up_calls(self) -> list[Call]:
        """The collective calls of `mixing.compare`, with the bytes of each rank."""
        if not self.compared:
            return []
        gathered = [Call("gather", tuple(self.product_sizes))] if any(self.product_sizes[1:]) else []
        return [self.rows.call(), *gathered]

    @property
    def down_calls(self) -> list[Call]:
        """The collective calls of `mixing.mix`, with the bytes of each rank."""
        if not self.mixed:
            return []
        scattered = [Call("scatter", tuple(self.weight_sizes))] if any(self.weight_sizes[1:]) else []
        return [*scattered, self.answers.call(answers=True)]
