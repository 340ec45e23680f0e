"""The sum over clients that does not depend on their order, nor on ranks.

Float addition is not associative, so a tree reduction over ranks would change bits with the number of ranks. Integers
are: every value becomes a multiple of one common power of two, small enough that no sum overflows.
"""

from collections.abc import Iterator, Sequence

import numpy as np

_BITS = 62
_MOST = 960  # of a shift: with a weight or a divisor before it, 2.0**shift stays a number
_BLOCK = 2**15  # values at a time, so that all steps find them in the cache

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
    for block, sums in _summed(terms, [total], shift, len(total)):
        total[block] = sums


def fold_exactly(
    terms: Sequence[Terms], sums: Sequence[np.ndarray], shift: int, divisor: float, out: np.ndarray
) -> None:
    """Write values times weights and sums [n] of `add_fixed`, added and divided, to `out` [n]."""
    for block, total in _summed(terms, sums, shift, len(out)):
        out[block] = total / (divisor * 2.0**shift)


def magnitudes(rows: np.ndarray) -> np.ndarray:
    """[m] float64, the largest magnitude in each of the rows [m, n]; not finite where a value is not."""
    with np.errstate(invalid="ignore"):  # NaN is an answer
        highest, lowest = rows.max(1, initial=0).astype(np.float64), rows.min(1, initial=0).astype(np.float64)
    largest: np.ndarray = np.maximum(highest, -lowest)
    return largest


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
