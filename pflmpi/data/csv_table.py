"""Reads a table from a .csv file: one sample per line; columns are features, labels, and the client."""

import csv
import io
from pathlib import Path

import numpy as np

from pflmpi.data.array_files import OwnArrays
from pflmpi.data.numbers import find_missing, is_number, to_float32, to_numbers
from pflmpi.regular_file import read_some

LABELS = ("label", "y", "class", "target")  # default names of the label column, in any case
MARKS = ("test", "validation")  # columns that assign samples to a split, in any case
_MARK_VALUES = {"0": False, "1": True, "false": False, "true": True, "0.0": False, "1.0": True}
_MAX_PIPE_BYTES = 1 << 28


class NoClientColumnError(ValueError):
    """A table has no column of the name that is given for the clients."""


def read_table(path: Path, label: str | list[str] | None, client: str | None) -> OwnArrays:
    """Reads a file with a header: features float32 [n, D]; labels and clients as text.

    Args:
        path: a UTF-8 file.
        label, client: column names; None: the columns of the default names, and as the label the last other column.

    Raises:
        ValueError: the content is no such table.
    """
    names, rows, line_numbers = _read_lines(path)
    for line, row in zip(line_numbers, rows, strict=True):
        if len(row) != len(names):
            raise ValueError(f"line {line} has {len(row)} values, the header has {len(names)}")
    _check_header(names, rows, label, client)
    columns = {name: np.array([row[place].strip() for row in rows]) for place, name in enumerate(names)}
    label_is_guessed = label is None and not any(find_column(names, name) for name in LABELS)
    not_labels = (client, *(name for name in names if name.lower() in ("client", *MARKS)))
    last = next((name for name in reversed(names) if name not in not_labels), None)
    labels, client = find_label_and_client(names, label, client, last)
    marks = find_mark_columns(names, (*labels, client))
    _check_complete(columns, [name for name in (*labels, client) if name is not None], line_numbers)
    feature_names = [name for name in names if name not in (*labels, client, *marks.values())]
    if not feature_names:
        raise ValueError(f"there are no columns besides {', '.join(labels)!r}; separate columns by commas")
    features = [_parse_features(name, columns[name], line_numbers, label_is_guessed) for name in feature_names]
    mark_values = {name: _parse_marks(column, columns[column], line_numbers) for name, column in marks.items()}
    return OwnArrays(
        x=to_float32(np.stack(features, 1), columns=feature_names, lines=line_numbers),
        y=np.stack([columns[name] for name in labels], 1) if isinstance(label, list) else columns[labels[0]],
        client=None if client is None else columns[client],
        test=mark_values.get("test"),
        validation=mark_values.get("validation"),
        columns=tuple(feature_names),
        label_columns=tuple(labels),
    )


def _check_complete(columns: dict[str, np.ndarray], keys: list[str], line_numbers: list[int]) -> None:
    """Raises `ValueError` for an empty value, or one such as NaN in the key columns: labels and client."""
    for name in (*keys, *columns):
        if (empty := np.flatnonzero(columns[name] == "")).size:
            raise ValueError(f"line {line_numbers[empty[0]]} has no {name}; fill it in, or leave the line out")
    for name in keys:
        if (row := find_missing(to_numbers(columns[name]))) is not None:
            raise ValueError(
                f"line {line_numbers[row]} has {name} = {columns[name][row]}; fill it in, or leave the line out"
            )


def find_column(names: list[str], wanted: str) -> str | None:
    """Returns the column of that name, in any case; None without one, `ValueError` for several."""
    matching = [name for name in names if name.lower() == wanted]
    if len(matching) > 1:
        raise ValueError(f"the columns {' and '.join(map(repr, matching))} may both be the {wanted}; rename one")
    return matching[0] if matching else None


def find_mark_columns(names: list[str], taken: tuple[str | None, ...]) -> dict[str, str]:
    """Returns the columns that assign samples to a split, by their names in `MARKS`, apart from the taken ones."""
    candidates = [name for name in names if name not in taken]
    return {name: column for name in MARKS if (column := find_column(candidates, name)) is not None}


def find_label_and_client(
    names: list[str], label: str | list[str] | None, client: str | None, default: str | None
) -> tuple[list[str], str | None]:
    """Returns the label columns and the client column; `default` is the label where neither user nor names say it.

    Raises:
        NoClientColumnError: there is no such column of clients.
        ValueError: there is no such column of labels, or several could be the label.
    """
    candidates = [column for name in LABELS if (column := find_column(names, name)) is not None]
    if label is None and len(candidates) > 1:
        raise ValueError(
            f"the columns {' and '.join(map(repr, candidates))} may all be the label; set data.label (pflmpi data: "
            "--label) to the one that is meant, since the others are trained on"
        )
    wanted = label if isinstance(label, list) else [label or next(iter(candidates), default)]
    for key, name in (*(("label", name) for name in wanted), ("client", client)):
        if name is not None and name not in names:
            error = NoClientColumnError if key == "client" else ValueError
            raise error(f"there is no column data.{key} = {name!r}; known: {', '.join(names)}")
    labels = [name for name in wanted if name is not None]
    if not labels:
        raise ValueError(f"set data.label (pflmpi data: --label), the column of the labels; known: {', '.join(names)}")
    return labels, client or find_column(names, "client")


def _check_header(names: list[str], rows: list[list[str]], label: str | list[str] | None, client: str | None) -> None:
    """Raises `ValueError` unless the first line names every column and is not a sample.

    A line with a number looks like a sample. It is a header all the same if pandas numbered the columns, if it has a
    column that the user names, or one called as a label, client or mark whose name is not just a value of the column.
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
    number = next(filter(is_number, names), None)
    if number is None or {*(label if isinstance(label, list) else [label]), client} & {*names}:
        return
    named = {place: name for place, name in enumerate(names) if name.lower() in (*LABELS, "client", *MARKS)}
    if all(any(row[place].strip() == name for row in rows) for place, name in named.items()):
        raise ValueError(
            f"its first line has {number!r}, as a sample would; expected a header, with the name of each column: add "
            "one, or, if this is it, name the column of the labels by data.label (pflmpi data: --label)"
        )


def _read_lines(path: Path) -> tuple[list[str], list[list[str]], list[int]]:
    """Returns the header, the rows below it that are not blank, and the line numbers on which these begin."""
    rows, line_numbers, last_line = [], [], 0
    with path.open("rb") as file:  # opened once, as it may be a pipe
        content = file.read() if path.is_file() else read_some(file, path, _MAX_PIPE_BYTES)
    for number, line in enumerate(io.BytesIO(content), start=1):
        try:
            line.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"line {number} is not UTF-8 ({error.reason}); save it as UTF-8") from error
    with io.StringIO(content.decode("utf-8-sig"), newline="") as file:
        reader = csv.reader(file)
        try:
            for row in reader:
                if not last_line or len(row) > 1 or "".join(row).strip():
                    rows.append(row)
                    line_numbers.append(last_line + 1)
                last_line = reader.line_num
        except csv.Error as error:
            raise ValueError(f"{error}; a quote may not be closed") from error
    if not rows or not rows[0]:
        raise ValueError("it is empty, or its first line is; expected a header, with the name of each column")
    return [name.strip() for name in rows[0]], rows[1:], line_numbers[1:]


def _parse_features(name: str, column: np.ndarray, line_numbers: list[int], label_is_guessed: bool) -> np.ndarray:
    """Converts a column [n] of text to float64; a value that is no number may be a label that was not named."""
    numbers = to_numbers(column)
    if numbers.dtype.kind != "f":
        row = next(row for row, value in enumerate(column) if not is_number(value))
        remedy = ", or leave it out"
        if label_is_guessed:
            remedy = ", leave it out, or name the column of the labels by data.label (pflmpi data: --label)"
        raise ValueError(
            f"column {name!r} has '{column[row]}' in line {line_numbers[row]}, no number; encode it{remedy}"
        )
    return numbers


def _parse_marks(name: str, column: np.ndarray, line_numbers: list[int]) -> np.ndarray:
    """Converts a column [n] of 0, 1, true and false to bool."""
    for line, value in zip(line_numbers, column, strict=True):
        if value.lower() not in _MARK_VALUES:
            raise ValueError(f"column {name!r} has '{value}' in line {line}; allowed: 0, 1, true, false")
    return np.array([_MARK_VALUES[value.lower()] for value in column])
