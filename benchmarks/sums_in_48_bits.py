"""Exact sums of several participants' entries in 48 bits instead of 64: what it costs, and how many do not fit.

    python benchmarks/sums_in_48_bits.py

An int64 sum becomes the nearest float32, and 16 bits of what that one lacks. Not used by pflmpi: below a network of
some 3 Gbit/s it would be faster, above it is slower. Entries are a model's, normal with 0.02, and each participant's
differ from it by a tenth of that; 5 participants, plain and weighted by samples. Nanoseconds of the processor, median.
"""

import statistics
import time
from collections.abc import Callable

import numpy as np

from pflmpi.messages.exact import add_fixed, common_shift

ENTRIES = 2**21
PARTICIPANTS = 5
BLOCK = 2**15  # entries at a time, which the cache holds
REPEATS = 7
_FLOAT_BITS, _MORE = 23, 15  # of a float32's fraction; of the rest, besides its sign


class Packing:
    """Packs and unpacks sums [n]; memory is used again."""

    def __init__(self, entries: int) -> None:
        self.floats, self.rest = np.empty(entries, np.float32), np.empty(entries, np.int16)
        self._near, self._short, self._shift = (np.empty(BLOCK, np.int64) for _ in range(3))
        self._exponent = np.empty(BLOCK, np.int32)

    def pack(self, sums: np.ndarray) -> int:
        """Fill `floats` and `rest`; the number of sums that they do not hold."""
        wrong = 0
        for start in range(0, len(sums), BLOCK):
            block = slice(start, start + BLOCK)
            np.copyto(self.floats[block], sums[block], casting="unsafe")
            np.copyto(self._near, self.floats[block], casting="unsafe")
            np.subtract(sums[block], self._near, out=self._near)
            np.right_shift(self._near, self._shifts(block), out=self._short)
            np.copyto(self.rest[block], self._short, casting="unsafe")
            np.left_shift(self._short, self._shift, out=self._short)
            wrong += np.count_nonzero(self._short != self._near)
        return wrong

    def unpack(self, out: np.ndarray) -> None:
        """Write the sums that are held."""
        for start in range(0, len(out), BLOCK):
            block = slice(start, start + BLOCK)
            np.copyto(self._short, self.rest[block])
            np.left_shift(self._short, self._shifts(block), out=self._short)
            np.copyto(self._near, self.floats[block], casting="unsafe")
            np.add(self._near, self._short, out=out[block])

    def _shifts(self, block: slice) -> np.ndarray:
        """By how many bits the rest of each float32 is shifted."""
        np.right_shift(self.floats[block].view(np.int32), _FLOAT_BITS, out=self._exponent)
        np.bitwise_and(self._exponent, 255, out=self._exponent)
        np.subtract(self._exponent, 127 + _FLOAT_BITS + _MORE, out=self._exponent)
        np.maximum(self._exponent, 0, out=self._exponent)
        np.copyto(self._shift, self._exponent)
        return self._shift


def nanoseconds(step: Callable[[np.ndarray], object], sums: np.ndarray) -> float:
    """Of the processor for an entry."""
    times = []
    for _ in range(REPEATS):
        before = time.process_time()
        step(sums)
        times.append(time.process_time() - before)
    return 1e9 * statistics.median(times) / ENTRIES


def main() -> None:
    """Print what each weighting costs."""
    random = np.random.default_rng(0)
    model = random.normal(0, 0.02, ENTRIES)
    values = (model + random.normal(0, 0.002, (PARTICIPANTS, ENTRIES))).astype(np.float32)
    weightings = {"plain": np.ones(PARTICIPANTS), "samples": random.integers(40, 600, PARTICIPANTS).astype(float)}
    for name, weights in weightings.items():
        largest = np.array([(np.abs(values).max(1) * weights).max()])
        sums, back, packing = np.zeros(ENTRIES, np.int64), np.empty(ENTRIES, np.int64), Packing(ENTRIES)
        add_fixed(sums, [(values, weights)], int(common_shift(largest, PARTICIPANTS)[0]))
        wrong = packing.pack(sums)
        packing.unpack(back)
        assert np.count_nonzero(back != sums) <= wrong
        packed, unpacked = nanoseconds(packing.pack, sums), nanoseconds(packing.unpack, back)
        even = 8 * (8 - 6) / (packed + unpacked)  # bits saved for a nanosecond: gigabits a second
        print(
            f"{name}: {packed:.2f} ns to pack an entry, {unpacked:.2f} to unpack it: faster below {even:.1f} Gbit/s; "
            f"{100 * wrong / ENTRIES:.3f} % do not fit"
        )


if __name__ == "__main__":
    main()
