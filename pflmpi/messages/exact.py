"""The sum over clients that does not depend on their order, nor on ranks.

Float addition is not associative, so a tree reduction over ranks would change bits with the number of ranks. Integers
are: every value becomes a multiple of one common power of two, small enough that no sum overflows.
"""

from collections.abc import Iterator, Sequence

import numpy as np

_BITS = 62
_MOST = 960  # of a shift: with a weight or a divisor before it, 2.0**shift stays a number
_BLOCK = 2**15  # entries at a time, so that all steps find them in the cache

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


def add_fixed(total: np.ndarray, terms: Sequence[Terms], shift: int) -> None:
    """Add values times weights to int64 sums [n] of multiples of 2**-shift, each rounded to nearest even."""
    scratch = _Scratch()
    for block in _blocks(len(total)):
        scratch.add(total[block], terms, block, shift)


def fold_exactly(
    terms: Sequence[Terms], sums: Sequence[np.ndarray], shift: int, divisor: float, out: np.ndarray
) -> None:
    """Write values times weights and sums [n] of `add_fixed`, added and divided, to `out` [n], a block at a time."""
    scratch = _Scratch()
    total = np.empty(min(_BLOCK, len(out)), np.int64)
    for block in _blocks(len(out)):
        part = total[: len(out[block])]
        part.fill(0)
        for fixed in sums:
            part += fixed[block]
        scratch.add(part, terms, block, shift)
        scratch.finish(part, shift, divisor, out[block])


def magnitudes(rows: np.ndarray) -> np.ndarray:
    """[m] float64, the largest magnitude in each of the rows [m, n]; not finite where a value is not."""
    with np.errstate(invalid="ignore"):  # NaN is an answer
        highest, lowest = rows.max(1, initial=0).astype(np.float64), rows.min(1, initial=0).astype(np.float64)
    largest: np.ndarray = np.maximum(highest, -lowest)
    return largest


class _Scratch:
    """Memory for the steps of a block, used again for the next one: new memory costs as much as the arithmetic."""

    def __init__(self) -> None:
        self._floats, self._integers = np.empty(_BLOCK), np.empty(_BLOCK, np.int64)

    def add(self, total: np.ndarray, terms: Sequence[Terms], block: slice, shift: int) -> None:
        """Add a block of values times weights to the sums of that block."""
        width = len(total)
        together = max(1, _BLOCK // max(width, 1))  # clients at a time
        for values, weights in terms:
            factors = weights * 2.0**shift  # exact
            for first in range(0, len(values), together):
                chunk = values[first : first + together, block]
                floats = self._floats[: chunk.size].reshape(chunk.shape)
                np.copyto(floats, chunk)
                floats *= factors[first : first + len(chunk), np.newaxis]
                np.rint(floats, out=floats)
                integers = self._integers[: chunk.size].reshape(chunk.shape)
                np.copyto(integers, floats, casting="unsafe")
                total += integers[0] if len(chunk) == 1 else integers.sum(0)

    def finish(self, total: np.ndarray, shift: int, divisor: float, out: np.ndarray) -> None:
        """Write the values of a block of sums."""
        floats = self._floats[: len(total)]
        np.divide(total, divisor * 2.0**shift, out=floats)
        np.copyto(out, floats, casting="unsafe")


def _blocks(count: int) -> Iterator[slice]:
    return (slice(start, min(start + _BLOCK, count)) for start in range(0, count, _BLOCK))
