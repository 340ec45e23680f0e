"""Formats numbers, ranks, bytes, names and errors as text."""

import csv
import io
import math
import re
import shlex
from collections.abc import Collection, Iterable, Sequence

# All control characters but tabs and line ends, and those that change the direction of text.
_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
UNSTORABLE = re.compile("[\0\ud800-\udfff]")  # characters that a text file cannot hold
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_ranges(numbers: Collection[int]) -> str:
    """Format numbers in ascending order, consecutive ones as a range.

    >>> format_ranges([7, 1, 2, 3]), format_ranges([0])
    ('1-3, 7', '0')
    """
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in ranges)


def format_ranks(numbers: Collection[int]) -> str:
    """Format ranks by number.

    >>> format_ranks([3]), format_ranks([0, 1])
    ('rank 3', 'ranks 0-1')
    """
    return f"rank{'s' if len(numbers) > 1 else ''} {format_ranges(numbers)}"


def format_decimal(value: float, places: int) -> str:
    """Format a value with that many decimals, or a very small one with as many significant digits.

    >>> format_decimal(0.5, 4), format_decimal(0.0000123456, 4)
    ('0.5000', '1.235e-05')
    """
    return f"{value:.{places}g}" if 0 < abs(value) < 1e-3 else f"{value:.{places}f}"


def pluralize(number: int, noun: str) -> str:
    """Format a number with its noun, singular or plural.

    >>> pluralize(1, "rank"), pluralize(3, "core"), pluralize(2, "class")
    ('1 rank', '3 cores', '2 classes')
    """
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def format_bytes(count: float) -> str:
    """Format bytes in a suitable unit.

    >>> format_bytes(700), format_bytes(582026 * 4), format_bytes(3 << 29), format_bytes(80 << 30)
    ('700 B', '2.22 MiB', '1.5 GiB', '80 GiB')
    """
    divisor, unit = scaled_bytes(count)
    return f"{round(count / divisor, 0 if unit == 'B' else 2):g} {unit}"


def scaled_bytes(largest: float) -> tuple[float, str]:
    """Divisor and unit for numbers of bytes, so that the largest is below 1024.

    >>> scaled_bytes(3_000_000)
    (1048576, 'MiB')
    """
    power = 0
    while largest >= 1024 ** (power + 1) and power + 1 < len(_UNITS):
        power += 1
    return 1024**power, _UNITS[power]


def join_truncated(names: Collection[str], most: int = 4, separator: str = ", ") -> str:
    """Join names; of many, join the first and say how many more there are.

    >>> join_truncated(["a", "b"]), join_truncated(["a", "b", "c"], most=2)
    ('a, b', 'a, b and 1 more')
    """
    first = separator.join(list(names)[:most])
    return first if len(names) <= most else f"{first} and {len(names) - most} more"


def format_numbers(values: Sequence[float], most: int = 4) -> str:
    """Format numbers; of many, only the first few.

    >>> format_numbers([0.13066, 0.5]), format_numbers(range(784))
    ('0.1307 0.5', '0 1 2 3 ... (784 of them)')
    """
    text = " ".join(f"{value:.4g}" for value in values[:most])
    return f"{text} ... ({len(values)} of them)" if len(values) > most else text


def first_line(error: BaseException, most: int = 300) -> str:
    """First line of an error's text, or its class if it has none; truncated if it is long.

    >>> first_line(ValueError("no number\\nat all")), first_line(KeyError()), first_line(ValueError("x" * 999), most=3)
    ('no number', 'KeyError', 'xxx... (999 characters)')
    """
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line if len(line) <= most else f"{line[:most]}... ({len(line)} characters)"


def short_repr(value: object, most: int = 120) -> str:
    """The repr of a value, truncated if it is long.

    >>> short_repr("fast"), short_repr(list(range(99)), most=20)
    ("'fast'", '[0, 1, 2, 3, 4, 5, 6... (386 characters)')
    """
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def short_name(name: str) -> str:
    """The class name of a reference to code outside the package; other names are returned unchanged.

    >>> short_name("./mine.py:FedMine"), short_name("fedavg")
    ('FedMine', 'fedavg')
    """
    return name.rpartition(":")[2]


def for_shell(path: object) -> str:
    """Quote a path for a shell command that is shown.

    >>> for_shell("runs/1"), for_shell("my runs/1")
    ('runs/1', "'my runs/1'")
    """
    return shlex.quote(str(path))


def printable(text: object) -> str:
    """Escape control characters for a terminal; names from files may contain some that move its cursor.

    >>> printable("body\x1b[31m"), printable("two\\nlines, Zürich")
    ('body\\\\x1b[31m', 'two\\nlines, Zürich')
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), str(text))


def spreadsheet_safe(text: str) -> str:
    """Escape text for a CSV cell so that no spreadsheet takes it for a formula; numbers stay as they are.

    >>> spreadsheet_safe("-0.03"), spreadsheet_safe("=1+2"), spreadsheet_safe("-x")
    ('-0.03', "'=1+2", "'-x")
    """
    if not text.startswith(("=", "+", "-", "@", "\t", "\r")):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def format_csv(lines: Iterable[Sequence[str | int | float]], exact: bool = False) -> str:
    """Format lines as CSV; NaN becomes empty.

    Args:
        exact: keep texts as they are, for programs; otherwise see `spreadsheet_safe`.

    >>> format_csv([("name", "accuracy"), ("=a", 0.25), ("b", math.nan)])
    "name,accuracy\\n'=a,0.25\\nb,\\n"
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerows([_cell(value, exact) for value in line] for line in lines)
    return file.getvalue()


def _cell(value: str | int | float, exact: bool) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.10g}"
    return str(value) if exact else spreadsheet_safe(str(value))
