"""A shard: a file with the rows of clients that changed, of one rank or of several of a node.

    /<cohort>/client            [m] ascending ids
    /<cohort>/row_crc32         [m] CRC-32 of each client's id (int64) and its row of every leaf, in sorted path order
    /<cohort>/rows/<path>       [m, ...]

So a few rows can be read and checked without the rest. A large leaf whose rows are all equal is stored once, with a
checksum of its own, and mapped to every client:

    /<cohort>/once/<path>       [1, ...] the row, which `row_crc32` leaves out
    /<cohort>/several/<path>    [b, ...] virtual: b times that row
    /<cohort>/rows/<path>       [m, ...] virtual, in pieces of b rows: what every reader finds

HDF5 cannot map many rows to one, and needs a mapping for each piece; with b = sqrt(m) both levels have few.
"""

import math
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from pflmpi.errors import CheckpointError
from pflmpi.store import checked_hdf5
from pflmpi.store.checked_hdf5 import HDF5Writer
from pflmpi.store.checksums import crc32_of_rows
from pflmpi.store.hdf5 import (
    Dataset,
    Group,
    file_type,
    h5py,
    select_rows,
    simple_space,
    untimed,
    with_groups,
    write_group,
)

Arrays = dict[str, np.ndarray]
ClientRows = dict[str, tuple[np.ndarray, Arrays]]

ID_BYTES = 12  # of a client's id and the checksum of its row
_LEAST_REPEATED = 1 << 20  # bytes of a leaf from which on equal rows are stored once
_MOST_READ = 4  # rows, for each one requested


def write_shard(path: Path, rows: ClientRows, attributes: Mapping[str, str | int] | None = None) -> None:
    """Write a shard.

    Args:
        rows: for each cohort the ascending ids [m] (int64) and, by path, the arrays [m, ...]. A large array made by
            `np.broadcast_to` from one row is stored as that row; see above.

    Raises:
        OSError: the file could not be written; see `atomic.replacing`.
    """
    for cohort, (clients, leaves) in rows.items():
        assert (np.diff(clients) > 0).all(), f"{cohort}: the ids are not ascending"
        for leaf, array in leaves.items():
            assert len(array) == len(clients), f"{cohort}/{leaf}: {len(array)} rows of {len(clients)} clients"

    def fill(writer: HDF5Writer) -> None:
        writer.about |= attributes or {}
        for cohort, (clients, leaves) in sorted(rows.items()):
            write_group(writer.file.id, f"{cohort}/rows")
            ids = clients.astype(np.int64)
            once = [leaf for leaf, array in leaves.items() if array.nbytes >= _LEAST_REPEATED and _is_repeated(array)]
            writer.write_dataset(f"{cohort}/client", ids)
            writer.write_dataset(f"{cohort}/row_crc32", _row_checksums(ids, leaves, once))
            for leaf, array in sorted(leaves.items()):
                if leaf in once:
                    _write_constant_rows(writer, cohort, leaf, array)
                else:
                    writer.write_dataset(f"{cohort}/rows/{leaf}", array)

    checked_hdf5.write(path, fill, sum(array.nbytes for _, leaves in rows.values() for array in leaves.values()))


def read_rows(path: Path, cohort: str, clients: np.ndarray, rows: np.ndarray) -> Arrays:
    """Reads the given rows [m] of a shard: arrays [m, ...] by path, checked to be intact and of `clients` [m].

    Args:
        rows: ascending.

    Raises:
        CheckpointError: the file is missing or damaged, or holds other clients in these rows.
    """
    with checked_hdf5.reading(path) as file:
        group = file[cohort]
        expected = checked_hdf5.open_stored(group, "row_crc32")[()]
        if len(rows) and rows[-1] >= len(expected):
            raise CheckpointError(f"{path} is not what the round file expects: no row {rows[-1]} of {cohort}")
        runs = split_consecutive(rows)
        leaves = {leaf: _read_leaf(group, leaf, rows, runs) for leaf in checked_hdf5.names(group["rows"])}
        once = checked_hdf5.names(group["once"]) if "once" in group else []
    wrong = clients[_row_checksums(clients, leaves, once) != expected[rows]]
    if len(wrong):
        raise CheckpointError(f"{path} is damaged: the rows of {len(wrong)} clients, the first is client {wrong[0]}")
    return leaves


def read_leaf(path: Path, cohort: str, leaf: str, rows: np.ndarray) -> np.ndarray:
    """Reads the given rows [m] of one leaf of a shard, an array [m, ...], and nothing else.

    Checks only the length of the file, and the leaf's checksum if all of its rows are read.

    Args:
        rows: ascending.

    Raises:
        CheckpointError: the file is missing, truncated or damaged, or does not have these rows.
    """
    if problem := checked_hdf5.find_truncation(path):
        raise CheckpointError(problem)
    with checked_hdf5.reading(path) as file:
        if len(rows) and rows[-1] >= len(checked_hdf5.open_stored(file[cohort], "client")):
            raise CheckpointError(f"{path} is not what the round file expects: no row {rows[-1]} of {cohort}")
        if (constant := _constant_rows(file[cohort], leaf, len(rows))) is not None:
            return constant
        stored = checked_hdf5.open_stored(file[cohort]["rows"], leaf)
        if len(rows) == len(stored):
            return checked_hdf5.read_dataset(file[cohort]["rows"], leaf)
        return _read_selected(stored, rows, split_consecutive(rows))


def find_row_problem(path: Path, cohort: str, clients: np.ndarray, rows: np.ndarray) -> str | None:
    """Returns why a shard does not hold the given clients [m] in the given rows [m]; None if it does."""
    try:
        with checked_hdf5.reading(path) as file:
            ids = checked_hdf5.read_dataset(file, f"{cohort}/client")
    except CheckpointError as error:
        return str(error)
    if len(rows) and (rows.max() >= len(ids) or not np.array_equal(ids[rows], clients)):
        return f"{path} is not what the round file expects: it holds other clients of {cohort}"
    return None


def split_consecutive(rows: np.ndarray) -> list[slice]:
    """Returns the slices of positions over which rows [m] count up by one.

    >>> split_consecutive(np.array([4, 5, 6, 9])), split_consecutive(np.array([], int))
    ([slice(0, 3, None), slice(3, 4, None)], [])
    """
    ends = [*(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True) if end > start]


def _read_leaf(cohort: Group, leaf: str, rows: np.ndarray, runs: list[slice]) -> np.ndarray:
    """Reads the given ascending rows [m] of a leaf, an array [m, ...]."""
    if (constant := _constant_rows(cohort, leaf, len(rows))) is not None:
        return constant
    return _read_selected(checked_hdf5.open_stored(cohort["rows"], leaf), rows, runs)


def _read_selected(dataset: Dataset, rows: np.ndarray, runs: list[slice]) -> np.ndarray:
    """Reads the given ascending rows [m] of a dataset, an array [m, ...]."""
    if len(rows) and rows[-1] - rows[0] < _MOST_READ * len(rows):  # one read instead of many
        span: np.ndarray = dataset[rows[0] : rows[-1] + 1]
        return span if len(span) == len(rows) else span[rows - rows[0]]
    selected = np.empty((len(rows), *dataset.shape[1:]), dataset.dtype)
    for run in runs:
        selected[run] = dataset[rows[run.start] : rows[run.stop - 1] + 1]
    return selected


def _row_checksums(clients: np.ndarray, leaves: Arrays, once: Collection[str]) -> np.ndarray:
    """Computes checksums [m] uint32 of the clients' rows, as described above, without the leaves in `once`."""
    checksums = crc32_of_rows(clients.astype("<i8"))
    for leaf in sorted(leaves.keys() - once):
        checksums = crc32_of_rows(leaves[leaf], checksums)
    return checksums


def _is_repeated(array: np.ndarray) -> bool:
    """Whether an array [m, ...] was broadcast from one row."""
    return len(array) > 1 and array.strides[0] == 0 and array.size > 0


def _write_constant_rows(writer: HDF5Writer, cohort: str, path: str, array: np.ndarray) -> None:
    """Store a repeated leaf [m, ...] of a cohort as one row, mapped to m rows."""
    rows, row = len(array), np.ascontiguousarray(array[:1])
    writer.write_dataset(f"{cohort}/once/{path}", row)
    several = math.isqrt(rows - 1) + 1
    group = writer.file[cohort]
    _map_constant_rows(group, f"once/{path}", f"several/{path}", row, 1, several)
    _map_constant_rows(group, f"several/{path}", f"rows/{path}", row, several, rows)


def _constant_rows(cohort: Group, path: str, rows: int) -> np.ndarray | None:
    """Reads a leaf that is stored once, as so many rows; None for another leaf, `CheckpointError` if it is damaged."""
    if f"once/{path}" not in cohort:
        return None
    row = checked_hdf5.read_dataset(cohort, f"once/{path}")
    return np.broadcast_to(row, (rows, *row.shape[1:]))


def _map_constant_rows(cohort: Group, source: str, path: str, row: np.ndarray, piece: int, rows: int) -> None:
    """Create a virtual dataset of so many rows that repeats a source of `piece` rows."""
    shape, creation = row.shape[1:], untimed(h5py.h5p.DATASET_CREATE)
    for start in range(0, rows, piece):
        count = min(piece, rows - start)
        part = select_rows(piece, [(0, count)], shape)
        shown = select_rows(rows, [(start, count)], shape)
        creation.set_virtual(shown, b".", f"{cohort.name}/{source}".encode(), part)
    space = simple_space((rows, *shape))
    h5py.h5d.create(cohort.id, path.encode(), file_type(row.dtype), space, creation, lcpl=with_groups())
