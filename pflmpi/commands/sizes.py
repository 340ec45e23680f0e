"""Bytes for people; apart from what else is shown, because it is needed where there is no torch."""

from pflmpi.analysis.units import scaled_bytes


def size(count: float) -> str:
    """Return bytes for people.

    >>> size(2048)
    '2.00 KiB'
    """
    divisor, unit = scaled_bytes(count)
    return f"{count:.0f} B" if unit == "B" else f"{count / divisor:.2f} {unit}"
