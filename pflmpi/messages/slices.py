"""Cuts the folded messages, as one vector of entries, into slices: each has an owner that sums it for rank 0.

The slices depend on the sizes of messages and on the participants of each rank alone. With a large model in float32, a
rank with one participant sends at most one model. A rank with several sends at most two, less its own slice, of which
it sends only the result; slices then belong to ranks with participants, so that two of them send at most 1.5 models,
three 1.67. Messages of a fixed size cannot be much smaller: any of the about 60 bits of an exact sum may decide how the
result is rounded. So if three ranks have several participants each, one of them sends more than 1.5 models, however the
slices are cut.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from pflmpi import tree
from pflmpi.messages.groups import ClientGroup, clients_per_rank
from pflmpi.messages.kinds import Sum
from pflmpi.messages.packing import numpy_type
from pflmpi.messages.traffic import Traffic

_WORD = 8  # bytes of a float64 or int64
_LEAST_SLICE = 2**16  # bytes of a message; a smaller slice costs another rank more than it saves
_GATHERED = 2**18  # rank 0 folds alone if other ranks send it at most so many bytes


@dataclass(frozen=True)
class Piece:
    """Entries `start` to `stop` of a leaf."""

    leaf: int  # its position among the leaves
    start: int
    stop: int
    at: int  # the bytes of the slice before it


@dataclass(frozen=True)
class Entries:
    """The leaves of some messages, in sorted order of their paths."""

    paths: tuple[str, ...]  # of each leaf; the first key is the name of the message
    like: tuple[Tensor, ...]  # their templates

    @classmethod
    def of(cls, kinds: Mapping[str, Sum]) -> "Entries":
        leaves = list(tree.leaves({name: kind.like for name, kind in kinds.items()}))
        return cls(tuple(path for path, _ in leaves), tuple(leaf for _, leaf in leaves))

    @cached_property
    def starts(self) -> np.ndarray:
        """Where each leaf begins in the vector, and the vector's length, [M + 1]."""
        return np.cumsum([0, *(leaf.numel() for leaf in self.like)])

    @property
    def count(self) -> int:
        return int(self.starts[-1])

    def bytes_before(self, positions: np.ndarray) -> np.ndarray:
        """Returns the bytes of the entries before each position [...] of the vector."""
        if not len(self.like):
            return np.zeros_like(positions)
        widths, byte_starts = self._sizes
        leaf = np.minimum(np.searchsorted(self.starts, positions, side="right") - 1, len(self.like) - 1)
        before: np.ndarray = byte_starts[leaf] + (positions - self.starts[leaf]) * widths[leaf]
        return before

    @cached_property
    def size(self) -> int:
        """Bytes of the vector."""
        return int(self._sizes[1][-1])

    @cached_property
    def _sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of an entry of each leaf [M]; bytes before each leaf and, last, of all [M + 1]."""
        widths = np.array([leaf.element_size() for leaf in self.like], np.int64)
        return widths, np.cumsum([0, *np.diff(self.starts) * widths])

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """Returns the parts of leaves that make up a slice of the vector."""
        pieces, at = [], 0
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        for leaf in range(first, len(self.like)):
            begin, end = self.starts[leaf : leaf + 2].tolist()
            if begin >= stop:
                break
            piece = Piece(leaf, max(start - begin, 0), min(stop, end) - begin, at)
            if piece.start < piece.stop:
                pieces.append(piece)
                at += (piece.stop - piece.start) * self.like[leaf].element_size()
        return pieces

    def cut(self, vector: Any, piece: Piece, start: int = 0) -> Any:
        """Cuts the entries of a piece from a vector of all entries, or of those from `start`."""
        begin = int(self.starts[piece.leaf]) - start
        return vector[begin + piece.start : begin + piece.stop]

    def cut_bytes(self, packed: Any, piece: Piece) -> Any:
        """Cuts the entries of a piece from the packed bytes [..., B] of a slice, as a view; bytes if it is a tensor."""
        size = (piece.stop - piece.start) * self.like[piece.leaf].element_size()
        part = packed[..., piece.at : piece.at + size]
        return part.view(numpy_type(self.like[piece.leaf])) if isinstance(part, np.ndarray) else part


@dataclass(frozen=True)
class Slices:
    """The owners of slices of the entries, and what ranks send to them.

    A rank sends each owner its participants' entries of the slice, one by one, or the int64 sum over them if that is
    smaller. A small vector has one owner, rank 0.
    """

    entries: Entries
    bounds: np.ndarray  # [R + 1] the slice of rank r is from `bounds[r]` to `bounds[r + 1]`
    participants: np.ndarray  # [R] number of participants of each rank
    sums: np.ndarray  # [R] bool, whether a rank sends sums to the owners of slices

    def slice(self, rank: int) -> tuple[int, int]:
        start, stop = self.bounds[rank : rank + 2].tolist()
        return start, stop

    @cached_property
    def widths(self) -> np.ndarray:
        """Entries of each rank's slice, [R]."""
        return np.diff(self.bounds)

    @cached_property
    def slice_bytes(self) -> np.ndarray:
        """Bytes of a message in each rank's slice, [R]."""
        return np.diff(self.entries.bytes_before(self.bounds))

    @cached_property
    def head(self) -> int:
        """Bytes before the entries in a part: the largest magnitude of each leaf, unless the owner has all entries."""
        return 0 if self.sums.any() or np.count_nonzero(self.widths) < 2 else _WORD * len(self.entries.like)

    @cached_property
    def _products(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Bytes that ranks send to each other, as terms of the product of a sender [R] and a receiver [R]."""
        heads = (self.participants > 0) & ~self.sums
        entries = np.where(self.sums, 0, self.participants)
        return [
            (_WORD * self.sums, self.widths),
            (self.head * heads, self.widths > 0),
            (entries, self.slice_bytes),
        ]

    def sent_by(self, rank: int) -> np.ndarray:
        """Returns the bytes that a rank sends to each, [R]."""
        sizes: np.ndarray = sum(senders[rank] * receivers for senders, receivers in self._products)
        return sizes

    def received_by(self, rank: int) -> np.ndarray:
        """Returns the bytes that a rank receives from each, [R]."""
        sizes: np.ndarray = sum(senders * receivers[rank] for senders, receivers in self._products)
        return sizes

    @cached_property
    def traffic(self) -> Traffic:
        """The exchange in which ranks send entries and sums to the owners."""
        sent: np.ndarray = sum(senders * receivers.sum() for senders, receivers in self._products)
        received: np.ndarray = sum(receivers * senders.sum() for senders, receivers in self._products)
        own: np.ndarray = sum(senders * receivers for senders, receivers in self._products)
        return Traffic(sent - own, received - own, down=False)

    @cached_property
    def finished(self) -> list[int]:
        """Bytes of the folded slices that rank 0 gathers, [R]."""
        return [0, *self.slice_bytes[1:].tolist()]

    @property
    def calls(self) -> list[Traffic]:
        """All transport calls of the fold."""
        ranks, size = len(self.widths), _WORD * len(self.entries.like)
        magnitudes = [Traffic.gather([size] * ranks), Traffic.broadcast(size, ranks)] if self.sums.any() else []
        return [*magnitudes, self.traffic, Traffic.gather(self.finished)]


def cut_slices(entries: Entries, assigned: list[list[ClientGroup]]) -> Slices:
    """Cuts the slices for the groups of participants of each rank."""
    ranks, count, size = len(assigned), entries.count, entries.size
    participants = clients_per_rank(assigned)
    senders, no_sums = np.flatnonzero(participants), np.zeros(ranks, bool)
    if len(senders) == 1:  # it has all entries
        return Slices(entries, _bounds(count, ranks, senders), participants, no_sums)
    server = np.array([0])
    if participants[1:].sum() * size <= _GATHERED:
        return Slices(entries, _bounds(count, ranks, server), participants, no_sums)
    # Of its own slice a rank sends only the result, so the ranks with most to send become owners first.
    owners = np.argsort(-participants, kind="stable")[: len(senders) if participants.max() > 1 else ranks]
    owners = np.sort(owners[: size // _LEAST_SLICE])
    bounds = _bounds(count, ranks, owners if len(owners) > 1 else server)
    return Slices(entries, bounds, participants, participants * size > _WORD * count)


def _bounds(count: int, ranks: int, owners: np.ndarray) -> np.ndarray:
    """Returns the bounds [R + 1] of equal slices for the given ranks, and empty ones for the others."""
    bounds: np.ndarray = count * np.searchsorted(owners, np.arange(ranks + 1)) // len(owners)
    return bounds
