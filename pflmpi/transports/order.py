"""Floats as integers in the same order, so that a maximum has the same bits in every library."""

import numpy as np

_NAN = np.int64(0x7FF8000000000000)  # the one NaN that comes out, whichever went in
_ALL_BUT_SIGN = np.int64(0x7FFFFFFFFFFFFFFF)


def to_keys(values: np.ndarray) -> np.ndarray:
    """Keys int64 [M] in the order of the values float64 [M]: -inf < ... < -0.0 < 0.0 < ... < inf < NaN."""
    bits = values.astype(np.float64).view(np.int64)
    bits[np.isnan(values)] = _NAN
    return np.where(bits < 0, bits ^ _ALL_BUT_SIGN, bits)


def from_keys(keys: np.ndarray) -> np.ndarray:
    """Values float64 [M] of keys int64 [M]; the inverse of `to_keys`."""
    return np.where(keys < 0, keys ^ _ALL_BUT_SIGN, keys).view(np.float64)
