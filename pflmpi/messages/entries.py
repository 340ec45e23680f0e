"""Folded messages as one vector of entries, leaf after leaf, so that ranks can have equal slices of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from pflmpi import tree
from pflmpi.messages.kinds import Sum
from pflmpi.messages.packing import numpy_type


@dataclass(frozen=True)
class Piece:
    """Entries `start` to `stop` of a leaf.

    Attributes:
        leaf: its position among the leaves.
        at: the bytes of the slice before it.
    """

    leaf: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class Entries:
    """The leaves of some messages, in sorted order of their paths.

    Attributes:
        paths: of each leaf; the first key is the name of the message.
        like: their templates.
    """

    paths: tuple[str, ...]
    like: tuple[Tensor, ...]

    @classmethod
    def of(cls, kinds: Mapping[str, Sum]) -> "Entries":
        """The entries of messages by name."""
        found = list(tree.leaves({name: kind.like for name, kind in kinds.items()}))
        return cls(tuple(path for path, _ in found), tuple(leaf for _, leaf in found))

    @cached_property
    def starts(self) -> np.ndarray:
        """[M + 1] where each leaf begins in the vector, and its length."""
        return np.cumsum([0, *(leaf.numel() for leaf in self.like)])

    @property
    def count(self) -> int:
        """Length of the vector."""
        return int(self.starts[-1])

    def bytes_before(self, positions: np.ndarray) -> np.ndarray:
        """Bytes of the entries before each of some positions [...] of the vector."""
        if not len(self.like):
            return np.zeros_like(positions)
        widths, ends = self._sizes
        leaf = np.minimum(np.searchsorted(self.starts, positions, side="right") - 1, len(self.like) - 1)
        before: np.ndarray = ends[leaf] + (positions - self.starts[leaf]) * widths[leaf]
        return before

    @cached_property
    def size(self) -> int:
        """Bytes of the vector."""
        return int(self._sizes[1][-1])

    @cached_property
    def _sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """[M] bytes of an entry of each leaf, and [M + 1] those before each leaf, and of all."""
        widths = np.array([leaf.element_size() for leaf in self.like], np.int64)
        return widths, np.cumsum([0, *np.diff(self.starts) * widths])

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """The parts of leaves that a slice of the vector consists of."""
        found, at = [], 0
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        for leaf in range(first, len(self.like)):
            begin, end = self.starts[leaf : leaf + 2].tolist()
            if begin >= stop:
                break
            piece = Piece(leaf, max(start - begin, 0), min(stop, end) - begin, at)
            if piece.start < piece.stop:
                found.append(piece)
                at += (piece.stop - piece.start) * self.like[leaf].element_size()
        return found

    def cut(self, vector: np.ndarray, piece: Piece, start: int = 0) -> np.ndarray:
        """The entries of a piece in a vector of all entries, or of those from `start`."""
        begin = int(self.starts[piece.leaf]) - start
        return vector[begin + piece.start : begin + piece.stop]

    def cut_bytes(self, packed: np.ndarray, piece: Piece) -> np.ndarray:
        """The entries of a piece in the packed bytes [..., B] of a slice."""
        size = (piece.stop - piece.start) * self.like[piece.leaf].element_size()
        return packed[..., piece.at : piece.at + size].view(numpy_type(self.like[piece.leaf]))
