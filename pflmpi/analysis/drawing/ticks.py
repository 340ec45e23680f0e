"""Round numbers along an axis, and their texts."""

from collections.abc import Sequence

import numpy as np

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


def linear(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """About `most` round numbers from low to high; whole ones if asked.

    >>> linear(0, 10, 5), linear(1, 3, 9, whole=True), linear(0.3, 1.2, 2)
    ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [1.0, 2.0, 3.0], [0.5, 1.0])
    """
    raw = max((high - low) / max(most, 1), np.finfo(np.float64).tiny * 1e10)
    power = 10.0 ** np.floor(np.log10(raw))
    steps = [factor * power for factor in _STEPS if not whole or factor * power % 1 == 0]
    step = next((step for step in steps if step >= raw * (1 - 1e-9)), 1.0)
    first, last = np.ceil(low / step - 1e-6), np.floor(high / step + 1e-6)
    return [float(number * step) + 0.0 for number in np.arange(first, last + 1)]  # not -0


def logarithmic(low: float, high: float, most: int) -> list[float]:
    """Powers of ten from low to high; with 2 and 5 times these where they are few.

    >>> logarithmic(2, 3000, 5), logarithmic(2, 30, 8)
    ([10.0, 100.0, 1000.0], [2.0, 5.0, 10.0, 20.0])
    """
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    found: list[float] = []
    for factors in ((1,), (1, 2, 5)):
        within = [m * 10.0**power for power in powers for m in factors if low <= m * 10.0**power * 1.000001 <= high]
        if not found or len(within) <= most:
            found = within
    return found[:: -(-len(found) // max(most, 1))] if found else []


def texts(values: Sequence[float]) -> list[str]:
    """Texts of numbers with as many decimals as they need, and no more.

    >>> texts([0.0, 0.5, 1.0]), texts([20.0, 40.0]), texts([1e7])
    (['0.0', '0.5', '1.0'], ['20', '40'], ['1e+07'])
    """
    if not len(values):
        return []
    largest = max(abs(value) for value in values)
    if largest >= 1e6 or (0 < largest < 1e-4):
        return [f"{value:.3g}" for value in values]
    found: list[str] = []
    for decimals in range(7):
        found = [f"{value:.{decimals}f}" for value in values]
        if all(abs(float(text) - value) <= 1e-9 + 1e-6 * abs(value) for text, value in zip(found, values, strict=True)):
            break
    return found
