"""A table in a .csv file: a sample in each line, a value, its label, or whose it is, in each column."""

import csv
import io
from pathlib import Path

import numpy as np

from pflmpi.regular_file import read_some

_MOST_OF_PIPE = 1 << 28  # bytes
_SIDES = {"0": False, "1": True, "false": False, "true": True, "0.0": False, "1.0": True}  # of the column `test`


def read_table(
    path: Path, label: str | None, client: str | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray, tuple[str, ...]]:
    """The table in a file, which begins with a line of names.

    Returns values [n, D], float32; labels [n], numbers where all are; whose samples they are [n], or None; whether they
    are for testing [n]; what the values are called [D].

    Args:
        path: of the file, UTF-8.
        label, client: their columns; None for those called so, and for the last one as the label.

    Raises:
        ValueError: what it holds is no such table.
    """
    names, rows, at = _lines(path)
    numbered = names == [*map(str, range(len(names)))]  # as pandas calls columns without names
    if not numbered and _numbers(np.array(names)).dtype.kind == "f":
        raise ValueError("its first line has numbers alone; expected a header, with the name of each column")
    if len({*names}) < len(names):
        raise ValueError(f"two columns are called {max(names, key=names.count)!r}; rename one")
    for number, row in zip(at, rows, strict=True):
        if len(row) != len(names):
            raise ValueError(f"line {number} has {len(row)} values, the header has {len(names)}")
    columns = {name: np.array([row[place].strip() for row in rows]) for place, name in enumerate(names)}
    for key, wanted in (("label", label), ("client", client)):
        if wanted is not None and wanted not in columns:
            raise ValueError(f"there is no column data.{key} = {wanted!r}; known: {', '.join(names)}")
    guessed = label is None and not {"label", "y", "class"} & {*names}
    label = label or next((name for name in ("label", "y", "class") if name in columns), names[-1])
    client = client or ("client" if "client" in columns else None)
    for name in filter(None, (label, client, *names)):
        if (empty := np.flatnonzero(columns[name] == "")).size:
            raise ValueError(f"line {at[empty[0]]} has no {name}; fill it in, or leave the line out")
    features = {
        name: _features(name, columns[name], at, guessed) for name in names if name not in (label, client, "test")
    }
    if not features:
        raise ValueError(f"there are no columns besides {label!r}; separate columns by commas")
    test = _sides(columns["test"], at) if "test" in columns else np.zeros(len(rows), bool)
    values = np.stack([*features.values()], 1)
    return values, _numbers(columns[label]), columns.get(client or ""), test, tuple(features)


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
    return values


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _sides(column: np.ndarray, at: list[int]) -> np.ndarray:
    """Which samples [n] are for testing; `at` are their lines."""
    for number, value in zip(at, column, strict=True):
        if value.lower() not in _SIDES:
            raise ValueError(f"column 'test' has '{value}' in line {number}; allowed: 0, 1, true, false")
    return np.array([_SIDES[value.lower()] for value in column])


def _numbers(labels: np.ndarray) -> np.ndarray:
    """Labels as numbers where all are, so that 10 comes after 9."""
    try:
        return labels.astype(np.float64)
    except ValueError:
        return labels
