"""Which rank owns which leaf of the models that are compared and mixed, and what travels then: a pure function.

Each leaf is whole on one rank, because sums over parts of it have other bits; no rank has all leaves of all
participants, unless these are too small for that to be worth a message.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pflmpi.messages.all_to_all import AllToAll
from pflmpi.messages.calls import Call
from pflmpi.messages.declared import Declared
from pflmpi.messages.entries import Entries
from pflmpi.messages.groups import ClientGroup, clients_of
from pflmpi.messages.kinds import Centres, Compared, Mixed

_NUMBER = 8  # bytes of a float64
_LEAST = 2**18  # bytes of all rows that are worth another owner


@dataclass(frozen=True)
class WeightedSum:
    """A leaf of weighted sums: its path, the compared leaf that they are of, and how many, P answers or K centres."""

    path: str
    leaf: int
    rows: int


@dataclass(frozen=True)
class LeafOwners:
    """What is compared and mixed in a round, and where.

    Attributes:
        compared: messages of the participants, by name.
        mixed: the answers, by name.
        centres: the server's own trees that are compared too, by name.
        clients: of each rank, the ascending ids of its participants.
    """

    compared: dict[str, Compared]
    mixed: dict[str, Mixed]
    centres: dict[str, Centres]
    clients: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, declared: Declared, assigned: list[list[ClientGroup]]) -> "LeafOwners":
        """Those of a round, none where nothing is compared; `assigned` are the groups of participants of each rank."""
        if not declared.compared or not any(assigned):
            return cls({}, {}, {}, ())
        clients = tuple(clients_of(groups) for groups in assigned)
        return cls(declared.compared, declared.mixed, declared.centres, clients)

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
        return np.array([leaf.nbytes for leaf in self.entries.like], np.int64)

    @cached_property
    def centre_rows(self) -> np.ndarray:
        """[M] rows of each leaf that the server has, K or 0; they come after the participants'."""
        counts = {kind.of: kind.count for kind in self.centres.values()}
        return np.array([counts.get(path.partition("/")[0], 0) for path in self.entries.paths], np.int64)

    @property
    def compared_rows(self) -> np.ndarray:
        """[M] rows of each leaf that are compared, P + K or P."""
        return len(self.participants) + self.centre_rows

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
    def answered(self) -> list[list[WeightedSum]]:
        """Of each rank the answers that it mixes, ascending by path."""
        return self._sums_of(self.mixed)

    @cached_property
    def summed(self) -> list[list[WeightedSum]]:
        """Of each rank the centres that it sums, ascending by path."""
        return self._sums_of(self.centres)

    def _sums_of(self, kinds: Mapping[str, Mixed | Centres]) -> list[list[WeightedSum]]:
        owner = {leaf: rank for rank, leaves in enumerate(self.owned) for leaf in leaves}
        found: list[list[WeightedSum]] = [[] for _ in self.clients]
        for name, kind in sorted(kinds.items()):
            rows = kind.count if isinstance(kind, Centres) else len(self.participants)
            for leaf, path in enumerate(self.entries.paths):
                if path.startswith(f"{kind.of}/"):
                    found[owner[leaf]].append(WeightedSum(name + path[len(kind.of) :], leaf, rows))
        return found

    @cached_property
    def counts(self) -> np.ndarray:
        """[R] participants of each rank."""
        return np.array([len(clients) for clients in self.clients], np.int64)

    @cached_property
    def row_bytes(self) -> np.ndarray:
        """[R] bytes of one row of the leaves that each rank owns."""
        return _sums(self.bytes, self.owned)

    @cached_property
    def answer_bytes(self) -> np.ndarray:
        """[R] bytes of one row of the answers that each rank mixes."""
        return _sums(self.bytes, [[one.leaf for one in answers] for answers in self.answered])

    @cached_property
    def centre_bytes(self) -> np.ndarray:
        """[R] bytes of the server's rows of the leaves that each rank owns."""
        return _sums(self.bytes * self.centre_rows, self.owned)

    @cached_property
    def rows(self) -> AllToAll:
        """Bytes that each rank sends to each owner; the server's own after its participants'."""
        server = (np.arange(len(self.clients)) == 0).astype(np.int64)
        return AllToAll(((self.counts, self.row_bytes), (server, self.centre_bytes)))

    @cached_property
    def answers(self) -> AllToAll:
        """Bytes that each owner sends to each rank."""
        return AllToAll(((self.answer_bytes, self.counts),))

    def memory(self, rank: int) -> int:
        """Bytes that a rank needs as an owner: all rows, what is made of them, and one leaf of both as float64."""
        if not self.compared:
            return 0
        largest = int((self.bytes * self.compared_rows)[self.owned[rank]].max(initial=0))
        rows = len(self.participants) * int(self.row_bytes[rank] + self.answer_bytes[rank])
        return rows + 2 * int(self.centre_bytes[rank]) + 4 * largest

    @cached_property
    def product_sizes(self) -> list[int]:
        """[R] bytes of the inner products that rank 0 gathers."""
        sizes: list[int] = (_NUMBER * _sums(self.compared_rows**2, self.owned)).tolist()
        return sizes

    def weight_sizes(self, made: list[list[WeightedSum]]) -> list[int]:
        """[R] bytes of the weights that rank 0 scatters, for what each rank makes."""
        rows = self.compared_rows.tolist()
        return [_NUMBER * sum(one.rows * rows[one.leaf] for one in each) if each else 0 for each in made]

    @property
    def up_calls(self) -> list[Call]:
        """The collective calls of `mixing.compare` and `mixing.sum_centres`, with the bytes of each rank."""
        if not self.compared:
            return []
        calls = [self.rows.call()]
        if any(self.product_sizes[1:]):
            calls.append(Call("gather", tuple(self.product_sizes)))
        if self.centre_bytes[1:].any():
            calls.append(Call("scatter", tuple(self.weight_sizes(self.summed))))
            calls.append(Call("gather", tuple(self.centre_bytes.tolist())))
        return calls

    @property
    def down_calls(self) -> list[Call]:
        """The collective calls of `mixing.mix`, with the bytes of each rank."""
        if not self.mixed:
            return []
        sizes = self.weight_sizes(self.answered)
        scattered = [Call("scatter", tuple(sizes))] if any(sizes[1:]) else []
        return [*scattered, self.answers.call(answers=True)]


def _sums(values: np.ndarray, leaves: list[list[int]]) -> np.ndarray:
    """[R] the sum of the values [M] of some leaves of each rank."""
    return np.array([int(values[each].sum()) if each else 0 for each in leaves], np.int64)
