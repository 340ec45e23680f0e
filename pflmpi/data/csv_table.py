"""A table in a .csv file: a sample in each line, a value, its label, or whose it is, in each column."""

import csv
import io
from pathlib import Path

import numpy as np

from pflmpi.data.array_files import OwnArrays
from pflmpi.data.dataset import as_numbers, first_missing, indistinct
from pflmpi.regular_file import read_some

LABELS = ("label", "y", "class", "target")  # what the column of the labels may be called, in any case
_MOST_OF_PIPE = 1 << 28  # bytes
MARKS = ("test", "validation")  # columns that say what a sample is for, in any case
_SIDES = {"0": False, "1": True, "false": False, "true": True, "0.0": False, "1.0": True}  # of these columns


def read_table(path: Path, label: str | list[str] | None, client: str | None) -> OwnArrays:
    """The table in a file, which begins with a line of names: values [n, D], float32; labels and clients as texts.

    Args:
        path: of the file, UTF-8.
        label, client: their columns; None for those called so, and for the last other one as the label.

    Raises:
        ValueError: what it holds is no such table.
    """
    names, rows, at = _lines(path)
    for number, row in zip(at, rows, strict=True):
        if len(row) != len(names):
            raise ValueError(f"line {number} has {len(row)} values, the header has {len(names)}")
    _check_header(names, rows, label, client)
    columns = {name: np.array([row[place].strip() for row in rows]) for place, name in enumerate(names)}
    guessed = label is None and not any(column_called(names, name) for name in LABELS)
    not_labels = (client, *(name for name in names if name.lower() in ("client", *MARKS)))
    last = next((name for name in reversed(names) if name not in not_labels), None)
    labels, client = label_and_client(names, label, client, last)
    marks = mark_columns(names, (*labels, client))
    for name in filter(None, (*labels, client, *names)):
        if (empty := np.flatnonzero(columns[name] == "")).size:
            raise ValueError(f"line {at[empty[0]]} has no {name}; fill it in, or leave the line out")
    for name in filter(None, (*labels, client)):
        if (lost := first_missing(as_numbers(columns[name]))) is not None:
            raise ValueError(f"line {at[lost]} has {name} = {columns[name][lost]}; fill it in, or leave the line out")
    others = [name for name in names if name not in (*labels, client, *marks.values())]
    features = {name: _features(name, columns[name], at, guessed) for name in others}
    if not features:
        raise ValueError(f"there are no columns besides {', '.join(labels)!r}; separate columns by commas")
    sides = {name: _sides(column, columns[column], at) for name, column in marks.items()}
    values = np.stack([*features.values()], 1)
    chosen = np.stack([columns[name] for name in labels], 1) if isinstance(label, list) else columns[labels[0]]
    test, validation = map(sides.get, MARKS)
    about = (values, chosen, columns.get(client or ""), test, validation)
    return OwnArrays(*about, columns=tuple(others), label_columns=tuple(labels))


def column_called(names: list[str], wanted: str) -> str | None:
    """The column with a name, in any case; None without one.

    Raises:
        ValueError: there are several.
    """
    matching = [name for name in names if name.lower() == wanted]
    if len(matching) > 1:
        raise ValueError(f"the columns {' and '.join(map(repr, matching))} may both be the {wanted}; rename one")
    return matching[0] if matching else None


def mark_columns(names: list[str], taken: tuple[str | None, ...]) -> dict[str, str]:
    """The columns that say what a sample is for, by their names in `MARKS`, among those that are not taken."""
    free = [name for name in names if name not in taken]
    return {name: column for name in MARKS if (column := column_called(free, name)) is not None}


def label_and_client(
    names: list[str], label: str | list[str] | None, client: str | None, otherwise: str | None
) -> tuple[list[str], str | None]:
    """The columns of the labels and of the clients among some; `otherwise` is the label where nothing says it.

    Raises:
        ValueError: there is no such column, or none that is clear.
    """
    called = [column for name in LABELS if (column := column_called(names, name)) is not None]
    if label is None and len(called) > 1:
        raise ValueError(
            f"the columns {' and '.join(map(repr, called))} may all be the label; set data.label (pflmpi data: --label)"
            " to the one that is meant, since the others are trained on"
        )
    wanted = label if isinstance(label, list) else [label or next(iter(called), otherwise)]
    for key, name in (*(("label", name) for name in wanted), ("client", client)):
        if name is not None and name not in names:
            raise ValueError(f"there is no column data.{key} = {name!r}; known: {', '.join(names)}")
    labels = [name for name in wanted if name is not None]
    if not labels:
        raise ValueError(f"set data.label (pflmpi data: --label), the column of the labels; known: {', '.join(names)}")
    return labels, client or column_called(names, "client")


def _check_header(names: list[str], rows: list[list[str]], label: str | list[str] | None, client: str | None) -> None:
    """Raise `ValueError` unless the first line has a name for each column, and is not a sample.

    A sample has numbers. So has a header that pandas numbers, or in which a column has the name that the user gives, or
    one that says what it is and is no value below.
    """
    if names == [*map(str, range(len(names)))]:  # as pandas calls columns without names
        return
    if "" in names or any(name.startswith("Unnamed: ") for name in names):
        place = next(place for place, name in enumerate(names, start=1) if not name or name.startswith("Unnamed: "))
        raise ValueError(
            f"column {place} has no name, as the row numbers that pandas writes; leave it out (to_csv(..., "
            "index=False)), or give it a name to train on it"
        )
    if len({*names}) < len(names):
        raise ValueError(f"two columns are called {max(names, key=names.count)!r}; rename one, or begin with a header")
    number = next(filter(_is_number, names), None)
    if number is None or {*(label if isinstance(label, list) else [label]), client} & {*names}:
        return
    named = {place: name for place, name in enumerate(names) if name.lower() in (*LABELS, "client", *MARKS)}
    if all(any(row[place].strip() == name for row in rows) for place, name in named.items()):
        raise ValueError(
            f"its first line has {number!r}, as a sample would; expected a header, with the name of each column: add "
            "one, or, if this is it, name the column of the labels by data.label (pflmpi data: --label)"
        )


def _lines(path: Path) -> tuple[list[str], list[list[str]], list[int]]:
    """The header, the rows below it that are not blank, and the lines of the file on which these begin."""
    rows, at, before = [], [], 0
    with path.open("rb") as file:  # once: it may be a pipe, of which no more is read than a table has
        content = file.read() if path.is_file() else read_some(file, path, _MOST_OF_PIPE)
    for number, line in enumerate(io.BytesIO(content), start=1):
        try:
            line.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"line {number} is not UTF-8 ({error.reason}); save it as UTF-8") from error
    with io.StringIO(content.decode("utf-8-sig"), newline="") as file:
        reader = csv.reader(file)
        try:
            for row in reader:
                if not before or len(row) > 1 or "".join(row).strip():
                    rows.append(row)
                    at.append(before + 1)
                before = reader.line_num
        except csv.Error as error:
            raise ValueError(f"{error}; a quote may not be closed") from error
    if not rows or not rows[0]:
        raise ValueError("it is empty, or its first line is; expected a header, with the name of each column")
    return [name.strip() for name in rows[0]], rows[1:], at[1:]


def _features(name: str, column: np.ndarray, at: list[int], guessed: bool) -> np.ndarray:
    """Values [n]; `at` are their lines, `guessed` is whether nothing says which column has the labels."""
    try:
        with np.errstate(over="ignore"):  # refused below
            values = column.astype(np.float32)
    except ValueError as error:
        number, value = next((line, value) for line, value in zip(at, column, strict=True) if not _is_number(value))
        label = ", leave it out, or name the column of the labels by data.label (pflmpi data: --label)"
        remedy = label if guessed else ", or leave it out"
        raise ValueError(f"column {name!r} has '{value}' in line {number}, no number; encode it{remedy}") from error
    for place in np.flatnonzero(np.isinf(values)):
        if np.isfinite(float(column[place])):
            raise ValueError(
                f"column {name!r} has '{column[place]}' in line {at[place]}, too large for float32; scale it"
            )
    if indistinct(exact := column.astype(np.float64)[:, None]) is not None:
        raise ValueError(
            f"column {name!r} has values from {exact.min():.17g} to {exact.max():.17g}, which float32 hardly tells "
            "apart; subtract their mean, or leave it out"
        )
    return values


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _sides(name: str, column: np.ndarray, at: list[int]) -> np.ndarray:
    """Which samples [n] a column marks; `at` are their lines."""
    for number, value in zip(at, column, strict=True):
        if value.lower() not in _SIDES:
            raise ValueError(f"column {name!r} has '{value}' in line {number}; allowed: 0, 1, true, false")
    return np.array([_SIDES[value.lower()] for value in column])
