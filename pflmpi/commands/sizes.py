"""Bytes for people; apart from what else is shown, because it is needed where there is no torch."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: float) -> str:
    """Return bytes for people.

    >>> size(2048)
    '2.00 KiB'
    """
    for unit in _UNITS[:-1]:
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} {_UNITS[-1]}"
