"""Which values of a user's data are numbers, missing, or too alike for float32."""

import math
from collections.abc import Sequence

import numpy as np

_MANY = 10**7  # values, 80 MB as float64


def to_integers(what: str, values: object) -> np.ndarray:
    """Returns whole numbers or flags as int64 [n], floats included; `ValueError` for anything else."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{what} have shape {list(array.shape)}, not [n]")
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{what} are no numbers, but {array.dtype}")
    if array.dtype == np.float16:  # in which the limits below overflow
        array = array.astype(np.float32)
    is_whole = (array > -(2.0**53)) & (array < 2.0**53) & (array == np.rint(array))
    if not is_whole.all():
        raise ValueError(f"{what} must be whole numbers, and one is {array[np.argmin(is_whole)]}")
    return array.astype(np.int64)


def is_number(text: str) -> bool:
    """Whether a text is a number; not one such as 1_000 or of other digits than 0 to 9, which Python reads as one."""
    try:
        float(text)
    except ValueError:
        return False
    return text.isascii() and "_" not in text


def to_numbers(values: np.ndarray) -> np.ndarray:
    """Converts text [n] to float64 if all of it is numbers, so that 10 sorts after 9; other values stay as they are."""
    if values.dtype.kind not in "SUO":
        return values
    try:
        codes = np.ascontiguousarray(values.astype(str)).view(np.uint32)  # of the characters, as in `is_number`
        return values if ((codes > 127) | (codes == ord("_"))).any() else values.astype(np.float64)
    except (TypeError, ValueError):
        return values


def find_missing(values: np.ndarray, allow_blank: bool = False) -> int | None:
    """Returns the index of the first of values [n] that is NaN, infinite, NaT, or text that means it; None if none.

    Empty text does, and text of spaces unless it is allowed, as where a space is a next character.
    """
    if values.dtype.kind in "fcmM":
        missing = ~np.isfinite(values)
    elif values.dtype.kind in "SUO":
        texts = values.astype(str)
        missing = np.isin(np.char.lower(np.char.strip(texts)), ("", "nan", "nat", "<na>"))
        missing &= ~(np.char.isspace(texts) & allow_blank)
    else:
        return None
    return int(missing.argmax()) if missing.any() else None


def to_float32(
    values: np.ndarray, what: str = "value", columns: Sequence[str] = (), lines: Sequence[int] = ()
) -> np.ndarray:
    """Converts numbers [n, ...] to float32; `ValueError` for values that it cannot hold or tell apart.

    Args:
        what: what a column is, where `columns` do not name it.
        lines: the lines of the samples [n] in their file.
    """
    numbers = values.reshape(len(values), math.prod(values.shape[1:]))
    with np.errstate(over="ignore"):  # refused below
        converted = numbers.astype(np.float32)
    if not (finite := np.isfinite(converted)).all():
        sample, column = np.argwhere(~finite)[0]
        number, place = numbers[sample, column], f"line {lines[sample]}" if lines else f"sample {sample}"
        problem = "too large for float32; scale it" if np.isfinite(number) else "not a finite number; fill it in"
        name = f"column {columns[column]!r}" if columns else f"{what} {column}"
        raise ValueError(f"{place} has {name} = {number}, {problem}, or leave the {place.split()[0]} out")
    if not np.can_cast(values.dtype, np.float32) and (column := _find_coarse_column(numbers)) is not None:
        name = f"column {columns[column]!r}" if columns else f"{what} {column}"
        raise ValueError(
            f"{name} of the samples is from {numbers[:, column].min()} to {numbers[:, column].max()}, which float32 "
            "hardly tells apart; subtract its mean, or leave it out"
        )
    return converted.reshape(values.shape)


def _find_coarse_column(values: np.ndarray) -> int | None:
    """Returns the first column of numbers [n, D] that float32 rounds by more than a hundredth of its range, or None.

    Columns that are constant, but for the rounding of float64, do not count.
    """
    if not len(values):
        return None
    sample = values[:: max(1, values.size // _MANY)].astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # refused elsewhere
        error, spread = np.abs(sample - sample.astype(np.float32)).max(0), sample.max(0) - sample.min(0)
    too_coarse = (error > 0.01 * spread) & (spread > 1e-12 * np.abs(sample).max(0)) & np.isfinite(error)
    return int(too_coarse.argmax()) if too_coarse.any() else None
