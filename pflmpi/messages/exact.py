"""The sum over clients that does not depend on their order, nor on ranks.

Float addition is not associative, so a tree reduction over ranks would change bits with the number of ranks. That of
integers is: every float becomes a multiple of one common power of two, small enough that no sum overflows. Integers are
added as they are; a sum of them that may leave int64 is refused (`Fold`).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pflmpi.messages.packing import to_numpy
from pflmpi.messages.slices import Entries, Piece

_BITS = 62
_MOST = 960  # of a shift: with a weight or a divisor before it, 2.0**shift stays a number
_BLOCK = 2**15  # values at a time, so that all steps find them in the cache

Part = Any  # bytes of a message: an array on the host, or a tensor on a GPU
# Of some clients: their weights [M, m] in each leaf, and what gives their values [m, n] of a piece, here or on a GPU.
Addends = list[tuple[Any, Callable[[Piece], Any]]]
Terms = tuple[np.ndarray, np.ndarray]  # values [m, n] of m clients, of any type, and their weights [m] float64


def common_shift(largest: np.ndarray, terms: int) -> np.ndarray:
    """The power of two that makes `terms` values of at most `largest` fit an int64 sum.

    Args:
        largest: [M] float64, the largest magnitude per leaf over all participants; not finite is refused before.
        terms: the number of participants, over all ranks.
    """
    _, exponent = np.frexp(largest)
    shift: np.ndarray = np.minimum(_BITS - int(np.ceil(np.log2(max(terms, 2)))) - exponent.astype(np.int64), _MOST)
    return shift


def magnitudes(rows: np.ndarray) -> np.ndarray:
    """[m] float64, the largest magnitude in each of the rows [m, n]; not finite where a value is not."""
    with np.errstate(invalid="ignore"):  # NaN is an answer
        highest, lowest = rows.max(1, initial=0).astype(np.float64), rows.min(1, initial=0).astype(np.float64)
    largest: np.ndarray = np.maximum(highest, -lowest)
    return largest


class OnHost:
    """Adds on the host; what adds on a GPU has the same methods."""

    def empty(self, size: int) -> np.ndarray:
        """Memory for so many bytes of a message."""
        return np.empty(size, np.uint8)

    def to_host(self, part: np.ndarray) -> np.ndarray:
        """The bytes of a message on the host."""
        return part

    def words(self, part: np.ndarray) -> np.ndarray:
        """The bytes of a message as int64."""
        return part.view(np.int64)

    def put(self, part: np.ndarray, content: np.ndarray) -> None:
        """Write bytes of the host."""
        part[:] = content

    def addends(self, groups: Sequence[Sequence[Tensor]], weights: Sequence[np.ndarray]) -> Addends:
        """What some groups of clients here add: of each, leaves as [m, n], and weights [M, m]."""
        rows = [[*map(to_numpy, leaves)] for leaves in groups]
        return [(own, partial(_values, leaves)) for own, leaves in zip(weights, rows, strict=True)]

    def received(self, entries: Entries, rows: np.ndarray, weights: np.ndarray) -> Addends:
        """What clients of another rank add: packed bytes [m, B] of a slice, and weights [M, m]."""
        return [(weights, partial(entries.cut_bytes, rows))]

    def largest(self, pieces: Sequence[Sequence[Terms]]) -> np.ndarray:
        """[p] float64, the largest magnitude in each of some pieces, times the weights."""
        return np.array([np.max([(magnitudes(values) * w).max() for values, w in terms]) for terms in pieces])

    def join(self, values: Sequence[np.ndarray], out: np.ndarray) -> None:
        """Write the values of all clients one below another."""
        np.concatenate(values, out=out)

    def add(self, out: np.ndarray, terms: Sequence[Terms], shift: int) -> None:
        """Write int64 sums [n] of values times weights, as multiples of 2**-shift, each rounded to nearest even.

        Integers, of which the weights are 0 or 1 and the shift is 0, are exact.
        """
        for block, total in _summed(terms, [], shift, len(out)):
            out[block] = total

    def finish(
        self,
        terms: Sequence[Terms],
        sums: Sequence[np.ndarray],
        shift: int,
        divisor: float,
        dtype: torch.dtype,
        out: np.ndarray,
    ) -> None:
        """Write values times weights and sums [n] of `add`, added and divided, to `out` [n]."""
        for block, total in _summed(terms, sums, shift, len(out)):
            out[block] = total / (divisor * 2.0**shift) if dtype.is_floating_point else total


def _values(leaves: Sequence[np.ndarray], piece: Piece) -> np.ndarray:
    """The values [m, n] of a piece, of leaves [m, ...]."""
    return leaves[piece.leaf][:, piece.start : piece.stop]


def _summed(
    terms: Sequence[Terms], sums: Sequence[np.ndarray], shift: int, count: int
) -> Iterator[tuple[slice, np.ndarray]]:
    """The int64 sums [w] of one block of entries after another, each in the memory of the one before."""
    floats, integers, totals = np.empty(_BLOCK), np.empty(_BLOCK, np.int64), np.empty(_BLOCK, np.int64)
    for start in range(0, count, _BLOCK):
        block = slice(start, min(start + _BLOCK, count))
        total = totals[: block.stop - start]
        total.fill(0)
        for fixed in sums:
            total += fixed[block]
        together = _BLOCK // len(total)  # clients at a time
        for values, weights in terms:
            if values.dtype.kind != "f":
                for row, weight in zip(values, weights.astype(np.int64), strict=True):
                    total += row[block] * weight
                continue
            factors = weights * 2.0**shift  # exact
            for first in range(0, len(values), together):
                chunk = values[first : first + together, block]
                scaled = floats[: chunk.size].reshape(chunk.shape)
                np.copyto(scaled, chunk)
                scaled *= factors[first : first + len(chunk), np.newaxis]
                np.rint(scaled, out=scaled)
                rounded = integers[: chunk.size].reshape(chunk.shape)
                np.copyto(rounded, scaled, casting="unsafe")
                total += rounded[0] if len(chunk) == 1 else rounded.sum(0)
        yield block, total
