"""A table in a .csv file: a sample in each line, a value, its label, or whose it is, in each column."""

import csv
from pathlib import Path

import numpy as np

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
    with path.open(newline="", encoding="utf-8-sig") as file:
        try:
            lines = list(csv.reader(file))
        except csv.Error as error:
            raise ValueError(f"{error}; a quote may not be closed") from error
    if not lines or not lines[0]:
        raise ValueError("it is empty, or its first line is; expected a header, with the name of each column")
    names, *rows = lines
    names = [name.strip() for name in names]
    numbered = names == [*map(str, range(len(names)))]  # as pandas calls columns without names
    if not numbered and _numbers(np.array(names)).dtype.kind == "f":
        raise ValueError("its first line has numbers alone; expected a header, with the name of each column")
    if len({*names}) < len(names):
        raise ValueError(f"two columns are called {max(names, key=names.count)!r}; rename one")
    for number, row in enumerate(rows, start=2):
        if len(row) != len(names):
            raise ValueError(f"line {number} has {len(row)} values, the header has {len(names)}")
    columns = {name: np.array([row[place].strip() for row in rows]) for place, name in enumerate(names)}
    for key, wanted in (("label", label), ("client", client)):
        if wanted is not None and wanted not in columns:
            raise ValueError(f"there is no column data.{key} = {wanted!r}; known: {', '.join(names)}")
    label = label or next((name for name in ("label", "y", "class") if name in columns), names[-1])
    client = client or ("client" if "client" in columns else None)
    for name in filter(None, (label, client)):
        if (empty := np.flatnonzero(columns[name] == "")).size:
            raise ValueError(f"line {empty[0] + 2} has no {name}; fill it in, or leave the line out")
    features = {name: _features(name, columns[name]) for name in names if name not in (label, client, "test")}
    if not features:
        raise ValueError(f"there are no columns besides {label!r}; separate columns by commas")
    test = _sides(columns["test"]) if "test" in columns else np.zeros(len(rows), bool)
    values = np.stack([*features.values()], 1)
    return values, _numbers(columns[label]), columns.get(client or ""), test, tuple(features)


def _features(name: str, column: np.ndarray) -> np.ndarray:
    try:
        with np.errstate(over="ignore"):  # infinity is refused with its sample
            return column.astype(np.float32)
    except ValueError as error:
        raise ValueError(f"column {name!r} holds no numbers ({error}); encode it, or leave it out") from error


def _sides(column: np.ndarray) -> np.ndarray:
    """Which lines [n] are for testing."""
    for number, value in enumerate(column, start=2):
        if not value:
            raise ValueError(f"line {number} has no test; fill it in, or leave the line out")
        if value.lower() not in _SIDES:
            raise ValueError(f"column 'test' has '{value}' in line {number}; allowed: 0, 1, true, false")
    return np.array([_SIDES[value.lower()] for value in column])


def _numbers(labels: np.ndarray) -> np.ndarray:
    """Labels as numbers where all are, so that 10 comes after 9."""
    try:
        return labels.astype(np.float64)
    except ValueError:
        return labels
