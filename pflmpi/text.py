"""Short texts of values, ranks and errors."""

from collections.abc import Collection


def spans(numbers: Collection[int]) -> str:
    """Return numbers with their runs put together.

    >>> spans([7, 1, 2, 3]), spans([0])
    ('1-3, 7', '0')
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def ranks(numbers: Collection[int]) -> str:
    """Return ranks by number.

    >>> ranks([3]), ranks([0, 1])
    ('rank 3', 'ranks 0-1')
    """
    return f"rank{'s' if len(numbers) > 1 else ''} {spans(numbers)}"


def gibibytes(count: int) -> str:
    """Return bytes as gibibytes.

    >>> gibibytes(3 << 29), gibibytes(80 << 30)
    ('1.5 GiB', '80 GiB')
    """
    return f"{_amount(count)} GiB"


def share(free: int, total: int) -> str:
    """Return what is free of a memory.

    >>> share(3 << 29, 80 << 30)
    '1.5 of 80 GiB'
    """
    return f"{_amount(free)} of {gibibytes(total)}"


def mebibytes(count: int) -> str:
    """Return bytes as mebibytes.

    >>> mebibytes(3 << 20)
    '3 MiB'
    """
    return f"{count / (1 << 20):.0f} MiB"


def some(names: Collection[str], most: int = 4) -> str:
    """Return names, of many only the first ones.

    >>> some(["a", "b"]), some(["a", "b", "c"], most=2)
    ('a, b', 'a, b and 1 more')
    """
    first = ", ".join(list(names)[:most])
    return first if len(names) <= most else f"{first} and {len(names) - most} more"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its kind where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _amount(count: int) -> str:
    amount = count / (1 << 30)
    return f"{amount:.0f}" if amount >= 10 else f"{amount:.1f}"
