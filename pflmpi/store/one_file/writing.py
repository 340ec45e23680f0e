"""Write a checkpoint as one HDF5 file: the content of the round file with the clients' rows in place of links to them.

A few clients are read at a time, and checked; so memory holds neither all models nor a whole array.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from pflmpi.errors import CheckpointError
from pflmpi.store import checked_hdf5, partition_file, reading, verify
from pflmpi.store.checked_hdf5 import Writing
from pflmpi.store.checksums import crc32
from pflmpi.store.descriptions import PARTITION, Described, Descriptions
from pflmpi.store.hdf5 import Dataset, File, h5py
from pflmpi.store.layout import NOWHERE, Layout
from pflmpi.store.metrics import metrics_file
from pflmpi.store.names import round_path
from pflmpi.store.one_file.reading import COMPLETE
from pflmpi.store.round_file import put_members

_AT_ONCE = 1 << 25  # bytes of clients' rows in memory
_CHUNK = 1 << 20  # bytes of a compressed piece; HDF5 keeps as much of each array in memory
_DESCRIPTION = "a whole checkpoint, which needs no other file; made by `pflmpi export --all` from a run of pflmpi"


class _Target:
    """An array that is written in pieces, row after row, with the CRC-32 over all of it."""

    def __init__(
        self, writing: Writing, path: str, shape: tuple[int, ...], dtype: np.dtype, compress: bool, said: Described
    ) -> None:
        packed = compress and bool(shape) and 0 not in shape
        options = {"chunks": _chunk(shape, dtype.itemsize), "compression": "gzip", "shuffle": True} if packed else {}
        self._dataset: Dataset = writing.file.create_dataset(path, shape, dtype, **options)
        self._writing, self._path, (self._unit, axes, self._text) = writing, path, said
        writing.name_axes(self._dataset.id, shape, axes)
        self._done, self.crc32 = 0, 0

    def append(self, rows: np.ndarray) -> None:
        """Write the next rows."""
        if rows.size:
            self._dataset[self._done : self._done + len(rows)] = rows
        self._done += len(rows)
        self.crc32 = crc32(rows, self.crc32)

    def finish(self) -> None:
        """Store the checksum."""
        self._writing.describe(self._path, self.crc32, self._unit, self._text)


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

    def fill(writing: Writing) -> None:
        with checked_hdf5.reading(round_path(run, round)) as index:
            about = checked_hdf5.about(index)
            kept = ("run", "metrics", "bytes", "normalisation", "own", "metrics_csv")
            writing.about |= {name: about[name] for name in kept}
            writing.about |= {"content": COMPLETE, "content_description": _DESCRIPTION}
            descriptions = Descriptions(json.loads(str(about["run"].get("diagnostics", "{}"))))
            _put_arrays(writing, index, descriptions, compress)
            _put_texts(writing, about["run"].get("partition_csv"), run, round)
        _put_clients(writing, run, layout, kinds, descriptions, compress, update)

    checked_hdf5.write(path, fill)


def _put_arrays(writing: Writing, index: File, descriptions: Descriptions, compress: bool) -> None:
    """Copy all but the clients' state; what is in `server` too is the same array by another name."""
    for name in ("client", "participant"):
        if name in index:
            writing.scale(name, name, checked_hdf5.get(index, name), "ids")
    for section in ("metrics", "bytes", "partition"):
        for path in checked_hdf5.names(index.get(section, {})):
            _copy(index, writing, f"{section}/{path}", compress, descriptions.figure(section, path))
    for path in checked_hdf5.names(index.get("diagnostics", {})):
        _copy(index, writing, f"diagnostics/{path}", compress, descriptions.diagnostic(path))
    writing.file.require_group("server")
    for path in checked_hdf5.names(index["server"]):
        _copy(index, writing, f"server/{path}", compress, descriptions.server(path))
    for name, own in checked_hdf5.about(index)["own"].items():
        message = index["received"][name]
        for path in checked_hdf5.names(message):
            link, whole = message.get(path, getlink=True), f"received/{name}/{path}"
            if isinstance(link, h5py.SoftLink):
                writing.file[whole] = writing.file[link.path]
                writing.about["arrays"][whole] = writing.about["arrays"][link.path.lstrip("/")]
            else:
                _copy(index, writing, whole, compress, descriptions.received(path, own))


def _copy(index: File, writing: Writing, path: str, compress: bool, said: Described) -> None:
    """Copy an array in pieces, and check it."""
    found, (unit, axes, text) = checked_hdf5.stored(index, path), said
    if not found.shape or not found.size:
        writing.put(path, checked_hdf5.get(index, path), axes=axes[: found.ndim], unit=unit, description=text)
        return
    known = tuple(name for name in axes if name in ("client", "participant"))
    copy = _Target(writing, path, found.shape, found.dtype, compress, (unit, known, text))
    at_once = _rows_at_once(found.nbytes // len(found))
    for start in range(0, len(found), at_once):
        copy.append(found[start : start + at_once])
    copy.finish()
    if copy.crc32 != checked_hdf5.recorded_crc32(found):
        raise CheckpointError(f"{found.name} in {found.file.filename} is damaged; its CRC-32 is another")


def _put_texts(writing: Writing, partition_csv: str | None, run: Path, round: int) -> None:
    """Say what metrics.csv was after the round, and store who holds how many samples of each class."""
    verify.check_metrics(run, round)
    length = int(writing.about["metrics_csv"][0])
    writing.about["metrics_text"] = metrics_file.text(run)[:length].decode()
    if partition_csv is not None and (problem := partition_file.damage(run, partition_csv)):
        raise CheckpointError(problem)
    if (counts := partition_file.read(run)) is not None:
        for name, array in (("train_by_class", counts.train), ("test_by_class", counts.test)):
            unit, axes, text = PARTITION[name]
            writing.put(f"partition/{name}", array, axes=axes, unit=unit, description=text)


def _put_clients(
    writing: Writing,
    run: Path,
    layout: Layout,
    kinds: Mapping[str, Mapping[str, tuple[tuple[int, ...], np.dtype]]],
    descriptions: Descriptions,
    compress: bool,
    update: Callable[[int, int], None],
) -> None:
    done = 0
    writing.file.create_group("clients")
    for cohort, leaves in kinds.items():
        place, members = (put_members(writing, cohort, layout, leaves), layout.cohorts[cohort])
        targets = {
            path: _Target(
                writing, f"{place}/{path}", (len(members), *shape), dtype, compress, descriptions.client(path)
            )
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
