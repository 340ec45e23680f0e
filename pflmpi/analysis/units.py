"""Bytes in a unit that people can read."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def scaled_bytes(largest: float) -> tuple[float, str]:
    """Return by what to divide bytes, and the unit that they then have, so that the largest is below 1024 of it.

    >>> scaled_bytes(3_000_000)
    (1048576, 'MiB')
    """
    power = 0
    while largest >= 1024 ** (power + 1) and power + 1 < len(_UNITS):
        power += 1
    return 1024**power, _UNITS[power]
