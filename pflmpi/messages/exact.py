"""Exact sums over clients, which do not depend on their order or on the number of ranks.

Float addition is not associative, so a tree reduction over ranks would change bits with the number of ranks. Integer
addition is: every float becomes a multiple of one common power of two, chosen so that no sum overflows. Integers are
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
_MAX_SHIFT = 960  # 2.0**shift stays finite, also times a weight or a divisor
_BLOCK = 2**15  # values at a time, so that all steps find them in the CPU's cache

Part = Any  # bytes of a message: an array on the host, or a tensor on a GPU
# Of groups of clients: their weights [M, m] in each leaf, and a function that returns their values [m, n] of a piece.
Addends = list[tuple[Any, Callable[[Piece], Any]]]
Terms = tuple[np.ndarray, np.ndarray]  # values [m, n] of m clients, of any type, and their weights [m] float64


def common_shift(largest: np.ndarray, terms: int) -> np.ndarray:
    """Returns the largest shift for which a sum of `terms` values of at most `largest`, times 2**shift, fits int64.

    Args:
        largest: [M] float64, the largest magnitude per leaf over all participants; finite.
        terms: the number of participants, over all ranks.
    """
    _, exponent = np.frexp(largest)
    shift: np.ndarray = _BITS - int(np.ceil(np.log2(max(terms, 2)))) - exponent.astype(np.int64)
    return shift.clip(max=_MAX_SHIFT)


def largest_magnitudes(rows: np.ndarray) -> np.ndarray:
    """Returns the largest magnitude in each of the rows [m, n], float64; not finite where a value is not."""
    with np.errstate(invalid="ignore"):  # NaN is a result
        highest, lowest = rows.max(1, initial=0).astype(np.float64), rows.min(1, initial=0).astype(np.float64)
    largest: np.ndarray = np.maximum(highest, -lowest)
    return largest


class OnHost:
    """Adds on the host. `OnDevice` has the same methods for a GPU."""

    def empty(self, size: int) -> np.ndarray:
        return np.empty(size, np.uint8)

    def to_host(self, part: np.ndarray) -> np.ndarray:
        return part

    def words(self, part: np.ndarray) -> np.ndarray:
        """Views the bytes of a message as int64."""
        return part.view(np.int64)

    def put(self, part: np.ndarray, content: np.ndarray) -> None:
        part[:] = content

    def addends(self, groups: Sequence[Sequence[Tensor]], weights: Sequence[np.ndarray]) -> Addends:
        """Returns the addends of clients of this rank: for each group, leaves as [m, n] and weights [M, m]."""
        rows = [[*map(to_numpy, leaves)] for leaves in groups]
        return [(own, partial(_piece_values, leaves)) for own, leaves in zip(weights, rows, strict=True)]

    def received(self, entries: Entries, rows: np.ndarray, weights: np.ndarray) -> Addends:
        """Returns the addends of clients of another rank: packed bytes [m, B] of a slice, and weights [M, m]."""
        return [(weights, partial(entries.cut_bytes, rows))]

    def largest(self, pieces: Sequence[Sequence[Terms]]) -> np.ndarray:
        """Returns the largest magnitude in each piece, times the weights, float64 [p]."""
        return np.array([np.max([(largest_magnitudes(values) * w).max() for values, w in terms]) for terms in pieces])

    def join(self, values: Sequence[np.ndarray], out: np.ndarray) -> None:
        """Writes the values of all clients, one row below another."""
        np.concatenate(values, out=out)

    def add(self, out: np.ndarray, terms: Sequence[Terms], shift: int) -> None:
        """Writes int64 sums [n] of values times weights, as multiples of 2**-shift, each rounded to nearest even.

        Sums of integers, whose weights are 0 or 1 and whose shift is 0, are exact.
        """
        for block, total in _sum_blocks(terms, [], shift, len(out)):
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
        """Adds values times weights and earlier sums [n] of `add`, divides, and writes the result to `out` [n]."""
        for block, total in _sum_blocks(terms, sums, shift, len(out)):
            out[block] = total / (divisor * 2.0**shift) if dtype.is_floating_point else total


def _piece_values(leaves: Sequence[np.ndarray], piece: Piece) -> np.ndarray:
    """Returns the values [m, n] of a piece, from leaves [m, ...]."""
    return leaves[piece.leaf][:, piece.start : piece.stop]


def _sum_blocks(
    terms: Sequence[Terms], sums: Sequence[np.ndarray], shift: int, count: int
) -> Iterator[tuple[slice, np.ndarray]]:
    """Yields the int64 sums [w] of one block of entries after another; they share one buffer."""
    floats, integers, totals = np.empty(_BLOCK), np.empty(_BLOCK, np.int64), np.empty(_BLOCK, np.int64)
    for start in range(0, count, _BLOCK):
        block = slice(start, min(start + _BLOCK, count))
        total = totals[: block.stop - start]
        total.fill(0)
        for earlier in sums:
            total += earlier[block]
        clients_at_once = _BLOCK // len(total)
        for values, weights in terms:
            if values.dtype.kind != "f":
                for row, weight in zip(values, weights.astype(np.int64), strict=True):
                    total += row[block] * weight
                continue
            factors = weights * 2.0**shift  # exact
            for first in range(0, len(values), clients_at_once):
                chunk = values[first : first + clients_at_once, block]
                scaled = floats[: chunk.size].reshape(chunk.shape)
                np.copyto(scaled, chunk)
                scaled *= factors[first : first + len(chunk), np.newaxis]
                np.rint(scaled, out=scaled)
                rounded = integers[: chunk.size].reshape(chunk.shape)
                np.copyto(rounded, scaled, casting="unsafe")
                total += rounded[0] if len(chunk) == 1 else rounded.sum(0)
        yield block, total
