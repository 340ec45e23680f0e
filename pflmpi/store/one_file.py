"""A checkpoint as one HDF5 file that needs no other: the content of the round file, with the clients' rows in place.

The rows are checked and written a few clients at a time, so that memory holds neither all models nor a whole array.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pflmpi.errors import CheckpointError
from pflmpi.store import checked_hdf5, metrics_file, run_folder, verify
from pflmpi.store.checked_hdf5 import HDF5Writer
from pflmpi.store.checksums import crc32
from pflmpi.store.descriptions import PARTITION
from pflmpi.store.digest import clients_at_once, digest_of_blocks
from pflmpi.store.hdf5 import Dataset, File, Group, name_axes
from pflmpi.store.layout import NOWHERE, Layout
from pflmpi.store.names import round_path
from pflmpi.store.shard import ClientRows

_AT_ONCE = 1 << 25  # bytes of clients' rows in memory
_CHUNK = 1 << 20  # bytes of a compressed chunk, which has whole rows; HDF5 keeps as much of each array in memory
_DESCRIPTION = "a whole checkpoint, which needs no other file; made by `pflmpi export --all` from a run of pflmpi"


class Array(NamedTuple):
    """An array of a file without its values; `value` is set for single numbers alone."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    bytes: int
    value: float | None


def check(path: Path, each_array: bool = False) -> None:
    """Raise `CheckpointError` unless a path is a whole checkpoint in one file, every byte as it was written.

    The message says what the path is instead, and where the rest of it is.

    Args:
        each_array: also verify the checksum of each array.
    """
    if problem := verify.explain_not_a_run(path):
        raise CheckpointError(problem)
    if each_array and (problems := checked_hdf5.damaged_arrays(path)):
        raise CheckpointError("; ".join(problems))


def arrays(path: Path) -> list[Array]:
    """Lists the arrays and single numbers of a checkpoint in one file."""
    arrays = []
    with checked_hdf5.reading(path) as file:
        for section in ("server", "clients", "metrics", "bytes", "normalisation"):
            group, single = file.get(section, {}), checked_hdf5.read_numbers(file, section)
            for name in sorted([*checked_hdf5.names(group), *single]):
                array = single[name] if name in single else checked_hdf5.open_stored(group, name)
                if not array.shape and name not in single:
                    array = checked_hdf5.read_dataset(group, name)
                value = None if array.shape else float(array)
                arrays.append(Array(f"{section}/{name}", array.shape, array.dtype, array.nbytes, value))
    return arrays


def round(path: Path) -> int:
    with checked_hdf5.reading(path) as file:
        return int(checked_hdf5.read_about(file)["run"]["round"])


def digest(path: Path) -> str:
    """Computes the digest of the state, which equals that of the run's folder; holds a few clients at a time."""
    with checked_hdf5.reading(path) as file:
        server = {name: checked_hdf5.read_dataset(file["server"], name) for name in checked_hdf5.names(file["server"])}
        return digest_of_blocks(server, _state_blocks(file))


class _Cohort(NamedTuple):
    """A cohort that keeps something: ascending ids of its clients [m], and arrays [m, ...] by path."""

    ids: np.ndarray
    leaves: dict[str, Dataset]


def _cohorts(file: File) -> dict[str, _Cohort]:
    """Opens the cohorts by name; several have a group each, with their ids, and an axis (see `round_file`)."""
    clients, cohorts = file["clients"], dict[str, _Cohort]()
    several = [name for name in sorted(clients) if f"{name}_client" in file]
    for name, group in [(name, clients[name]) for name in several] or [("", clients)]:
        leaves = {path: checked_hdf5.open_stored(group, path) for path in checked_hdf5.names(group)}
        if several:
            del leaves["client"]
            cohorts[name] = _Cohort(checked_hdf5.read_dataset(group, "client"), leaves)
        elif leaves:
            cohorts[name] = _Cohort(np.arange(len(next(iter(leaves.values()))), dtype=np.int64), leaves)
    return cohorts


def _state_blocks(file: File) -> Iterator[ClientRows]:
    """Yields the state of a few clients at a time, in ascending order of the ids."""
    cohorts = _cohorts(file)
    all_ids = np.concatenate([np.empty(0, np.int64), *(ids for ids, _ in cohorts.values())])
    sizes = [sum(leaf.nbytes for leaf in leaves.values()) // len(ids) for ids, leaves in cohorts.values()]
    at_once = clients_at_once(max(sizes, default=0))
    for start in np.unique(all_ids // at_once * at_once).tolist():
        block: ClientRows = {}
        for name, (ids, leaves) in cohorts.items():
            first, last = np.searchsorted(ids, [start, start + at_once])
            if last > first:
                block[name] = ids[first:last], {path: leaf[first:last] for path, leaf in leaves.items()}
        yield block


def write(path: Path, run: Path, round: int, compress: bool, update: Callable[[int, int], None]) -> None:
    """Write the checkpoint of a round to one file: a copy of the round file, with the clients' rows in place.

    Args:
        compress: whether to compress the clients' arrays with gzip, which every HDF5 program reads.
        update: called with the number of clients written so far, and of all.

    Raises:
        OSError: the file could not be written; see `atomic.replacing`.
        CheckpointError: something of the round is missing or damaged.
    """
    layout, kinds = run_folder.read_layout(run, round), run_folder.read_kinds(run, round)

    def fill(writer: HDF5Writer) -> None:
        about, arrays = writer.about, writer.about["arrays"]
        for name in ("shards", "cohorts"):
            del about[name]
        about |= {"content": verify.COMPLETE, "content_description": _DESCRIPTION}
        about["arrays"] = {
            path: {key: value for key, value in entry.items() if key != "missing"}
            for path, entry in arrays.items()
            if not path.startswith("layout/")
        }
        del writer.file["layout"]
        _write_text_files(writer, run, round)
        _write_clients(writer, run, layout, kinds, compress, update)

    checked_hdf5.write(path, fill, copied=round_path(run, round))


def _write_text_files(writer: HDF5Writer, run: Path, round: int) -> None:
    """Store what metrics.csv was after the round, and the sample counts of partition.csv."""
    lines = verify.check_metrics(run, round)
    writer.about |= {"metrics_text": lines.decode(), "metrics_csv": list(metrics_file.checksum(lines))}
    if (counts := verify.partition(run, writer.about["run"])) is not None:
        for name, array in counts.sides.items():
            writer.write_dataset(f"partition/{name}_by_class", array, PARTITION[f"{name}_by_class"])


def _write_clients(
    writer: HDF5Writer,
    run: Path,
    layout: Layout,
    kinds: Mapping[str, Mapping[str, tuple[tuple[int, ...], np.dtype]]],
    compress: bool,
    update: Callable[[int, int], None],
) -> None:
    """Replace the virtual arrays of each cohort by their rows."""
    done, clients = 0, writer.file["clients"]
    num_clients = int((layout.file != NOWHERE).sum())
    for cohort, leaves in kinds.items():
        group, members = (clients if len(layout.cohorts) == 1 else clients[cohort]), layout.cohorts[cohort]
        arrays = {
            path: _replace_virtual(group, path, (len(members), *shape), dtype, compress)
            for path, (shape, dtype) in leaves.items()
        }
        checksums = dict.fromkeys(leaves, 0)
        at_once = max(_AT_ONCE // max(run_folder.row_bytes(leaves), 1), 1)
        for start in range(0, len(members), at_once):
            block = members[start : start + at_once]
            for path, rows in run_folder.read_clients_of_layout(run, layout, block)[cohort][1].items():
                if rows.size:
                    arrays[path][start : start + len(rows)] = rows
                checksums[path] = crc32(rows, checksums[path])
            done += len(block)
            update(done, num_clients)
        for path, checksum in checksums.items():
            writer.describe(arrays[path].name.lstrip("/"), checksum)


def _replace_virtual(group: Group, path: str, shape: tuple[int, ...], dtype: np.dtype, compress: bool) -> Dataset:
    """Create a dataset in place of a virtual one, with the same names of axes."""
    axes = group[path].attrs.get("DIMENSION_LIST")
    del group[path]
    options: dict[str, object] = {}
    if compress and 0 not in shape:
        rows = _CHUNK // (math.prod(shape[1:]) * dtype.itemsize)
        chunks = (min(max(rows, 1), shape[0]), *shape[1:])
        options = {"chunks": chunks, "compression": "gzip", "shuffle": True}
    dataset = group.create_dataset(path, shape, dtype, **options)
    if axes is not None:
        name_axes(dataset.id, axes)
    return dataset
