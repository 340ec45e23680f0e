"""Write a checkpoint as one HDF5 file: the content of the round file with the clients' rows in place of links to them.

A few clients are read at a time, and checked; so memory holds neither all models nor a whole array.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from pflmpi.errors import CheckpointError
from pflmpi.store import checked_hdf5, partition_file, reading
from pflmpi.store.checksums import crc32
from pflmpi.store.descriptions import describe
from pflmpi.store.hdf5 import Dataset, File, Group, h5py, write_attribute
from pflmpi.store.layout import NOWHERE, Layout
from pflmpi.store.metrics import history
from pflmpi.store.names import round_path
from pflmpi.store.one_file.reading import COMPLETE

_AT_ONCE = 1 << 25  # bytes of clients' rows in memory
_CHUNK = 1 << 20  # bytes of a compressed piece; HDF5 keeps as much of each array in memory
_log = logging.getLogger(__name__)
_DESCRIPTION = "a whole checkpoint, which needs no other file; made by `pflmpi export --all` from a run of pflmpi"


class _Target:
    """An array that is written in pieces, row after row, with the CRC-32 over all of it."""

    def __init__(self, group: Group, path: str, shape: tuple[int, ...], dtype: np.dtype, compress: bool) -> None:
        packed = compress and bool(shape) and 0 not in shape
        options = {"chunks": _chunk(shape, dtype.itemsize), "compression": "gzip", "shuffle": True} if packed else {}
        self._dataset: Dataset = group.create_dataset(path, shape, dtype, **options)
        self._done, self._crc32 = 0, 0

    def append(self, rows: np.ndarray) -> None:
        """Write the next rows."""
        if rows.size:
            self._dataset[self._done : self._done + len(rows)] = rows
        self._done += len(rows)
        self._crc32 = crc32(rows, self._crc32)

    def finish(self) -> None:
        """Store the checksum."""
        write_attribute(self._dataset.id, "crc32", np.uint32(self._crc32))


def write(path: Path, run: Path, round: int, compress: bool, update: Callable[[int, int], None]) -> None:
    """Write the checkpoint of a round to one file.

    Args:
        compress: with gzip, which every HDF5 program reads.
        update: called with the number of clients that are done, and of all.

    Raises:
        OSError: the file could not be written; see `atomic.replacing`.
        CheckpointError: something of the round is missing or damaged.
    """
    layout, kinds = reading.read_layout(run, round), reading.read_kinds(run, round)

    def fill(file: File) -> None:
        with checked_hdf5.reading(round_path(run, round)) as index:
            for name, value in index.attrs.items():
                if name != "format_version" and not name.startswith("content"):
                    write_attribute(file.id, name, value)
            write_attribute(file.id, "content", COMPLETE)
            write_attribute(file.id, "content_description", _DESCRIPTION)
            for section in ("server", "metrics", "bytes", "diagnostics", "partition", "normalisation"):
                _copy(index.get(section, {}), file.create_group(section), compress)
            linked = _copy_received(index, file, compress)
            _put_texts(index, file, run)
        _put_clients(file, run, layout, kinds, compress, update)
        datasets = {path: file[path].id for path in checked_hdf5.names(file) if path not in linked}
        describe(file, datasets, several_cohorts=len(layout.cohorts) > 1)

    checked_hdf5.write(path, fill)


def _copy(source: Group, target: Group, compress: bool) -> None:
    for path in checked_hdf5.names(source):
        _copy_array(source, target, path, compress)


def _copy_array(source: Group, target: Group, path: str, compress: bool) -> None:
    """Copy an array in pieces, and check it."""
    found = checked_hdf5.stored(source, path)
    if not found.shape or not found.size:
        checked_hdf5.put(target, path, checked_hdf5.get(source, path))
        return
    copy = _Target(target, path, found.shape, found.dtype, compress)
    at_once = _rows_at_once(found.nbytes // len(found))
    for start in range(0, len(found), at_once):
        copy.append(found[start : start + at_once])
    copy.finish()
    if target[path].attrs["crc32"] != found.attrs["crc32"]:
        raise CheckpointError(f"{found.name} in {found.file.filename} is damaged; its CRC-32 is another")


def _copy_received(index: File, file: File, compress: bool) -> set[str]:
    """Copy messages; what is in `server` too is the same array by another name, among those that are returned."""
    received, linked = file.create_group("received"), set()
    for name, message in index["received"].items() if "received" in index else ():
        group = received.create_group(name)
        write_attribute(group.id, "own", message.attrs["own"])
        for path in checked_hdf5.names(message):
            link = message.get(path, getlink=True)
            if isinstance(link, h5py.SoftLink):
                group[path] = file[link.path]
                linked.add(f"received/{name}/{path}")
            else:
                _copy_array(message, group, path, compress)
    return linked


def _put_texts(index: File, file: File, run: Path) -> None:
    """Store metrics.csv as text, and partition.csv as who holds how many samples of each class."""
    recorded = reading.read_history(run, round := int(index.attrs["round"]))
    text = b"" if recorded is None else history.whole(run, recorded)
    if text is None:
        _log.warning("%s; `history` of the file is empty", history.lost(run, round))
    checked_hdf5.put(file, "history", np.array(text or b"\n", "S"))
    expected = index.attrs.get("partition_csv")
    if expected is not None and (problem := partition_file.damage(run, expected)):
        raise CheckpointError(problem)
    if (counts := partition_file.read(run)) is not None:
        for name, array in (("train_by_class", counts.train), ("test_by_class", counts.test)):
            checked_hdf5.put(file["partition"], name, array)


def _put_clients(
    file: File,
    run: Path,
    layout: Layout,
    kinds: Mapping[str, Mapping[str, tuple[tuple[int, ...], np.dtype]]],
    compress: bool,
    update: Callable[[int, int], None],
) -> None:
    clients, done = file.create_group("clients"), 0
    for cohort, leaves in kinds.items():
        group, members = clients, layout.cohorts[cohort]
        if len(layout.cohorts) > 1:
            group = clients.create_group(cohort)
            checked_hdf5.put(group, "client", members)
        targets = {
            path: _Target(group, path, (len(members), *shape), dtype, compress)
            for path, (shape, dtype) in leaves.items()
        }
        for block in _blocks(members, sum(math.prod(shape) * dtype.itemsize for shape, dtype in leaves.values())):
            for path, rows in reading.rows_of(run, layout, block)[cohort][1].items():
                targets[path].append(rows)
            done += len(block)
            update(done, int((layout.file != NOWHERE).sum()))
        for target in targets.values():
            target.finish()


def _blocks(members: np.ndarray, row_bytes: int) -> Iterator[np.ndarray]:
    at_once = _rows_at_once(row_bytes)
    yield from (members[start : start + at_once] for start in range(0, len(members), at_once))


def _rows_at_once(row_bytes: int) -> int:
    return _power_of_two(_AT_ONCE // max(row_bytes, 1))


def _chunk(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Extent of a compressed piece: some whole rows, or a part of one.

    Rows are a power of two, as are those written at once, so that no piece is written twice.

    >>> _chunk((1000, 64, 3, 5, 5), 4), _chunk((20, 1000, 4096), 4)
    ((32, 64, 3, 5, 5), (1, 64, 4096))
    """
    chunk = list(shape)
    for axis, extent in enumerate(shape):
        rest = math.prod(shape[axis + 1 :]) * itemsize
        chunk[axis] = min(extent, _power_of_two(_CHUNK // rest))
        if rest <= _CHUNK:
            break
    return tuple(chunk)


def _power_of_two(number: int) -> int:
    """The largest power of two up to a number, at least 1."""
    return 1 << max(number.bit_length() - 1, 0)
