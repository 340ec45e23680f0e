"""The state of a round in the folder of a run: only what is requested is read, and everything read is checked."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pflmpi.errors import CheckpointError
from pflmpi.store import checked_hdf5, shard, virtual_rows
from pflmpi.store import layout as layouts
from pflmpi.store.checked_hdf5 import Checksum
from pflmpi.store.digest import clients_at_once, digest_of_blocks
from pflmpi.store.hdf5 import Group
from pflmpi.store.layout import Layout
from pflmpi.store.names import round_path
from pflmpi.store.names import rounds as rounds
from pflmpi.store.shard import Arrays, ClientRows, read_rows
from pflmpi.text import short_repr

Kinds = dict[str, tuple[tuple[int, ...], np.dtype]]  # of a client's arrays, by path
JSON = ("versions", "code", "unseen", "fork", "class_names", "personal", "diagnostics")  # attributes that are its text
_AT_ONCE = 1 << 28  # bytes of clients' rows in memory


class NamedArray(NamedTuple):
    """An array in a round file: the names of its axes (see docs/checkpoint.md), its shape and type."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype


def read_server(run: Path, round: int) -> Arrays:
    """Server state by path.

    Raises:
        CheckpointError: the round file is missing, damaged or in another format; the same holds for all functions here.
    """
    return read_section(run, round, "server")


def read_metrics(run: Path, round: int) -> Arrays:
    """Metrics of the round by name."""
    metrics = read_section(run, round, "metrics")
    with checked_hdf5.reading(round_path(run, round)) as file:
        if "participant" in file:
            metrics["participants"] = checked_hdf5.read_dataset(file, "participant")
    return metrics


def read_bytes(run: Path, round: int) -> Arrays:
    return read_section(run, round, "bytes")


def read_section(run: Path, round: int, section: str) -> Arrays:
    """The arrays of a section, with what `about` says of it in place of arrays without client and class."""
    with checked_hdf5.reading(round_path(run, round)) as file:
        group: Group = file.get(section, {})
        arrays = {path: checked_hdf5.read_dataset(group, path) for path in checked_hdf5.names(group)}
        return checked_hdf5.numbers(file, section) | arrays


def read_metrics_checksum(run: Path, round: int) -> Checksum:
    """Length and CRC-32 of metrics.csv as it was after the round."""
    with checked_hdf5.reading(round_path(run, round)) as file:
        return Checksum(*checked_hdf5.about(file)["metrics_csv"])


def read_array(run: Path, round: int, section: str, path: str) -> np.ndarray | None:
    """One array of the server, the metrics or the bytes, and no other; None if there is none of that path."""
    with checked_hdf5.reading(round_path(run, round)) as file:
        if (section, path) == ("metrics", "participants"):
            return checked_hdf5.read_dataset(file, "participant") if "participant" in file else None
        numbers, group = checked_hdf5.numbers(file, section), file.get(section, {})
        if path in numbers:
            return numbers[path]
        return checked_hdf5.read_dataset(group, path) if path in group else None


def read_received(run: Path, round: int, clients: np.ndarray) -> Arrays:
    """Messages that clients [m] are tested with after a round and do not keep: arrays [m, ...] by message and path.

    Only these clients' rows are read, and shared arrays are not copied. Empty if clients keep their last messages.
    """
    messages: Arrays = {}
    with checked_hdf5.reading(round_path(run, round)) as file:
        for name, message in file["received"].items() if "received" in file else ():
            for path in checked_hdf5.names(message):
                array = checked_hdf5.read_dataset(message, path)
                rows = (
                    array[clients]
                    if checked_hdf5.about(file)["own"][name]
                    else np.broadcast_to(array, (len(clients), *array.shape))
                )
                messages[f"{name}/{path}"] = rows
    return messages


def read_layout(run: Path, round: int) -> Layout:
    """Where each client's row is stored."""
    with checked_hdf5.reading(round_path(run, round)) as file:
        return layouts.read_layout(file)


def read_checksums(run: Path, round: int) -> dict[str, Checksum]:
    """Checksums of the shards that a round file joins, by name."""
    with checked_hdf5.reading(round_path(run, round)) as file:
        shards = checked_hdf5.about(file)["shards"]
        return {name: Checksum(*shards[name]) for name in layouts.names_of_shards(shards)}


def read_kinds(run: Path, round: int) -> dict[str, Kinds]:
    """For each cohort that keeps anything, path -> (shape, dtype) of one client's state."""
    with checked_hdf5.reading(round_path(run, round)) as file:
        clients: Group = file["clients"]
        cohorts = sorted(checked_hdf5.about(file)["cohorts"])
        groups = {cohorts[0]: clients} if len(cohorts) == 1 else {name: clients[name] for name in sorted(clients)}
        return {
            cohort: {
                path: virtual_rows.kind_of(group[path])
                for path in checked_hdf5.names(group)
                if len(cohorts) == 1 or path != "client"
            }
            for cohort, group in groups.items()
            if checked_hdf5.names(group)
        }


def read_named_arrays(run: Path, round: int) -> dict[str, NamedArray]:
    """What the arrays in `server` and `clients` are, by their paths in the file; no values are read."""
    with checked_hdf5.reading(round_path(run, round)) as file:
        paths = [f"{section}/{path}" for section in ("server", "clients") for path in checked_hdf5.names(file[section])]
        arrays = {path: file[path] for path in paths}
        return {
            path: NamedArray(
                tuple(str(axis[0].name).lstrip("/") for axis in array.dims), array.shape, virtual_rows.dtype_of(array)
            )
            for path, array in arrays.items()
        }


def read_leaf(run: Path, layout: Layout, cohort: str, leaf: str, clients: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Rows [m, ...] of one leaf for the given clients [m] of a cohort, in that order; see `shard.read_leaf`.

    Args:
        clients: ids without repetition.
        like: an array with the shape and dtype of one row.
    """
    leaf_rows = np.empty((len(clients), *like.shape), like.dtype)
    order = np.argsort(clients, kind="stable")
    for name, part in layout.shards(cohort, clients):
        positions = order[np.searchsorted(clients, part, sorter=order)]
        leaf_rows[positions] = shard.read_leaf(run / name, cohort, leaf, layout.row[part])
    return leaf_rows


def read_attributes(run: Path, round: int) -> dict[str, str | int | float]:
    """What the round file says about itself and the run; round and configuration are among it."""
    with checked_hdf5.reading(round_path(run, round)) as file:
        attributes: dict[str, str | int | float] = checked_hdf5.about(file)["run"]
    kinds = {**dict.fromkeys(attributes, str | int | float), "round": int, "config": str}
    for name, kind in kinds.items():
        if not isinstance(value := attributes.get(name), kind) or (name in JSON and not _is_json(value)):
            wrong = f"its attribute {name!r} is {short_repr(value)}, which no pflmpi writes"
            raise CheckpointError(f"{round_path(run, round)} cannot be read: {wrong}; put a good copy in its place")
    return attributes


def _is_json(text: object) -> bool:
    try:
        json.loads(str(text))
    except (ValueError, RecursionError):
        return False
    return True


def read_clients(run: Path, round: int, clients: np.ndarray) -> ClientRows:
    """State of those of the given clients that have one.

    Args:
        clients: ids without repetition, in any order.

    Returns:
        For each cohort with any of them, the ascending ids [m] and, by path, the rows [m, ...].
    """
    layout = read_layout(run, round)
    outside = clients[(clients < 0) | (clients >= len(layout.file))]
    if len(outside):
        raise CheckpointError(f"{run} has clients 0 to {len(layout.file) - 1}; client {outside[0]} was requested")
    return rows_of(run, layout, clients)


def by_client(rows: ClientRows) -> dict[int, Arrays]:
    """What each of the clients keeps, by id and path."""
    return {
        client: {path: array[row, ...] for path, array in leaves.items()}
        for ids, leaves in rows.values()
        for row, client in enumerate(ids.tolist())
    }


def read_pieces(run: Path, round: int, clients: np.ndarray) -> Iterator[tuple[np.ndarray, Arrays]]:
    """State of those of the given clients that have one, as little at a time as memory asks for.

    Yields:
        The ascending ids [m] of some clients of one cohort and, by path, the rows [m, ...]; equal ones may be one in
        memory, see `shard.write_shard`.
    """
    layout, kinds = read_layout(run, round), read_kinds(run, round)
    for cohort, leaves in kinds.items():
        at_once = max(1, _AT_ONCE // max(row_bytes(leaves), 1))
        for name, part in layout.shards(cohort, clients):
            for start in range(0, len(part), at_once):
                piece = part[start : start + at_once]
                yield piece, read_rows(run / name, cohort, piece, layout.row[piece])


def rows_of(run: Path, layout: Layout, clients: np.ndarray) -> ClientRows:
    """`read_clients` for a layout that has already been read."""
    result: ClientRows = {}
    for cohort in sorted(layout.cohorts):
        shards = layout.shards(cohort, clients)
        if not shards:
            continue
        ids = np.sort(np.concatenate([part for _, part in shards]))
        gathered: Arrays = {}
        for name, part in shards:
            path = run / name
            rows = read_rows(path, cohort, part, layout.row[part])
            if not gathered:
                gathered = {leaf: np.empty((len(ids), *array.shape[1:]), array.dtype) for leaf, array in rows.items()}
            _check_alike(path, rows, gathered)
            positions = np.searchsorted(ids, part)
            for leaf, array in rows.items():
                gathered[leaf][positions] = array
        result[cohort] = (ids, gathered)
    return result


def digest(run: Path, round: int) -> str:
    """Digest of a round on disk, 64 hexadecimal digits; only a few clients at a time are in memory.

    Raises:
        CheckpointError: something is missing or damaged.
    """
    layout, at_once = read_layout(run, round), block_length(run, round)
    clients = np.flatnonzero(layout.file != layouts.NOWHERE)
    blocks = (clients[start : start + at_once] for start in range(0, len(clients), at_once))
    return digest_of_blocks(read_server(run, round), (rows_of(run, layout, block) for block in blocks))


def block_length(run: Path, round: int) -> int:
    """How many clients to read at once, of a round whose every client is read."""
    return clients_at_once(max(map(row_bytes, read_kinds(run, round).values()), default=0))


def row_bytes(leaves: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in leaves.values())


def _check_alike(path: Path, rows: Arrays, others: Arrays) -> None:
    kinds = [{leaf: (array.shape[1:], array.dtype) for leaf, array in arrays.items()} for arrays in (rows, others)]
    if kinds[0] != kinds[1]:
        raise CheckpointError(f"{path} is not what the round file expects: its leaves differ from the other shards'")
