"""Reads a round from the folder of a run: only what is requested is read, and everything read is checked."""

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

Kinds = dict[str, tuple[tuple[int, ...], np.dtype]]  # shape and dtype of a client's arrays, by path
JSON = (  # attributes with JSON text
    "versions",
    "code",
    "unseen",
    "fork",
    "class_names",
    "client_names",
    "personal",
    "diagnostics",
)
_AT_ONCE = 1 << 28  # bytes of clients' rows in memory


class NamedArray(NamedTuple):
    """An array in a round file: the names of its axes (see docs/checkpoint.md), its shape and type."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype


def read_server(run: Path, round: int) -> Arrays:
    """Reads the server's state, by path.

    Raises:
        CheckpointError: the round file is missing, damaged or in another format; all functions here raise it.
    """
    return read_section(run, round, "server")


def read_metrics(run: Path, round: int) -> Arrays:
    """Reads the metrics of the round, by name."""
    metrics = read_section(run, round, "metrics")
    with checked_hdf5.reading(round_path(run, round)) as file:
        if "participant" in file:
            metrics["participants"] = checked_hdf5.read_dataset(file, "participant")
    return metrics


def read_bytes(run: Path, round: int) -> Arrays:
    return read_section(run, round, "bytes")


def read_section(run: Path, round: int, section: str) -> Arrays:
    """Reads the arrays of a section, by path, and its single numbers, which are in `about`."""
    with checked_hdf5.reading(round_path(run, round)) as file:
        group: Group = file.get(section, {})
        arrays = {path: checked_hdf5.read_dataset(group, path) for path in checked_hdf5.names(group)}
        return checked_hdf5.read_numbers(file, section) | arrays


def read_metrics_checksum(run: Path, round: int) -> Checksum:
    """Reads length and CRC-32 of metrics.csv as it was after the round."""
    with checked_hdf5.reading(round_path(run, round)) as file:
        return Checksum(*checked_hdf5.read_about(file)["metrics_csv"])


def read_array(run: Path, round: int, section: str, path: str) -> np.ndarray | None:
    """Reads one array or number of a section alone; None if there is none of that path."""
    with checked_hdf5.reading(round_path(run, round)) as file:
        if (section, path) == ("metrics", "participants"):
            return checked_hdf5.read_dataset(file, "participant") if "participant" in file else None
        numbers, group = checked_hdf5.read_numbers(file, section), file.get(section, {})
        if path in numbers:
            return numbers[path]
        return checked_hdf5.read_dataset(group, path) if path in group else None


def read_received(run: Path, round: int, clients: np.ndarray) -> Arrays:
    """Reads the messages that clients [m] are tested with and do not keep: arrays [m, ...] by message and path.

    Messages that all clients share are broadcast, not copied. Empty if clients keep their last messages.
    """
    messages: Arrays = {}
    with checked_hdf5.reading(round_path(run, round)) as file:
        if "received" not in file:
            return messages
        own = checked_hdf5.read_about(file)["own"]
        for name, message in file["received"].items():
            for path in checked_hdf5.names(message):
                array = checked_hdf5.read_dataset(message, path)
                rows = array[clients] if own[name] else np.broadcast_to(array, (len(clients), *array.shape))
                messages[f"{name}/{path}"] = rows
    return messages


def read_layout(run: Path, round: int) -> Layout:
    """Reads where each client's row is stored."""
    with checked_hdf5.reading(round_path(run, round)) as file:
        return layouts.read_layout(file)


def read_checksums(run: Path, round: int) -> dict[str, Checksum]:
    """Reads the checksums of the shards of a round, by name."""
    with checked_hdf5.reading(round_path(run, round)) as file:
        shards = checked_hdf5.read_about(file)["shards"]
        return {name: Checksum(*shards[name]) for name in layouts.check_shard_names(shards)}


def read_kinds(run: Path, round: int) -> dict[str, Kinds]:
    """Reads, for each cohort that keeps anything, path -> (shape, dtype) of one client's state."""
    kinds: dict[str, Kinds] = {}
    with checked_hdf5.reading(round_path(run, round)) as file:
        clients: Group = file["clients"]
        cohorts = checked_hdf5.read_about(file)["cohorts"]
        several = len(cohorts) != 1  # which have a group each, with the clients' ids in it
        groups = {name: clients[name] for name in sorted(clients)} if several else {cohorts[0]: clients}
        for cohort, group in groups.items():
            if paths := checked_hdf5.names(group):
                paths = [path for path in paths if not (several and path == "client")]
                kinds[cohort] = {path: virtual_rows.read_kind(group[path]) for path in paths}
    return kinds


def read_named_arrays(run: Path, round: int) -> dict[str, NamedArray]:
    """Reads axes, shape and dtype of the arrays in `server` and `clients`, by path in the file, but no values."""
    arrays = {}
    with checked_hdf5.reading(round_path(run, round)) as file:
        for section in ("server", "clients"):
            for path in checked_hdf5.names(file[section]):
                array = file[section][path]
                axes = tuple(str(axis[0].name).lstrip("/") for axis in array.dims)
                arrays[f"{section}/{path}"] = NamedArray(axes, array.shape, virtual_rows.read_dtype(array))
    return arrays


def read_leaf(run: Path, layout: Layout, cohort: str, leaf: str, clients: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Reads rows [m, ...] of one leaf for the given clients [m] of a cohort, in that order; see `shard.read_leaf`.

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
    """Reads what the round file says about the run, its configuration among it."""
    with checked_hdf5.reading(round_path(run, round)) as file:
        attributes: dict[str, str | int | float] = checked_hdf5.read_about(file)["run"]
    types = {**dict.fromkeys(attributes, str | int | float), "round": int, "config": str}
    for name, kind in types.items():
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
    """Reads the state of those of the given clients that have one.

    Args:
        clients: ids without repetition, in any order.

    Returns:
        For each cohort with any of them, the ascending ids [m] and, by path, the rows [m, ...].
    """
    layout = read_layout(run, round)
    unknown = clients[(clients < 0) | (clients >= len(layout.file))]
    if len(unknown):
        raise CheckpointError(f"{run} has clients 0 to {len(layout.file) - 1}; client {unknown[0]} was requested")
    return read_clients_of_layout(run, layout, clients)


def split_by_client(rows: ClientRows) -> dict[int, Arrays]:
    """Splits rows into the state of each client, by id and path."""
    return {
        client: {path: array[row, ...] for path, array in leaves.items()}
        for ids, leaves in rows.values()
        for row, client in enumerate(ids.tolist())
    }


def read_pieces(run: Path, round: int, clients: np.ndarray) -> Iterator[tuple[np.ndarray, Arrays]]:
    """Reads the state of those of the given clients that have one, in pieces of limited size.

    Yields:
        The ascending ids [m] of some clients of one cohort and, by path, the rows [m, ...]; equal rows may share
        memory, see `shard.write_shard`.
    """
    layout, kinds = read_layout(run, round), read_kinds(run, round)
    for cohort, leaves in kinds.items():
        at_once = max(1, _AT_ONCE // max(row_bytes(leaves), 1))
        for name, part in layout.shards(cohort, clients):
            for start in range(0, len(part), at_once):
                piece = part[start : start + at_once]
                yield piece, read_rows(run / name, cohort, piece, layout.row[piece])


def read_clients_of_layout(run: Path, layout: Layout, clients: np.ndarray) -> ClientRows:
    """As `read_clients`, for a layout that has already been read."""
    rows_by_cohort: ClientRows = {}
    for cohort in sorted(layout.cohorts):
        shards = layout.shards(cohort, clients)
        if not shards:
            continue
        ids = np.sort(np.concatenate([part for _, part in shards]))
        leaves: Arrays = {}
        for name, part in shards:
            path = run / name
            rows = read_rows(path, cohort, part, layout.row[part])
            if not leaves:
                leaves = {leaf: np.empty((len(ids), *array.shape[1:]), array.dtype) for leaf, array in rows.items()}
            _check_same_leaves(path, rows, leaves)
            positions = np.searchsorted(ids, part)
            for leaf, array in rows.items():
                leaves[leaf][positions] = array
        rows_by_cohort[cohort] = (ids, leaves)
    return rows_by_cohort


def digest(run: Path, round: int) -> str:
    """Computes the digest of a round on disk, 64 hexadecimal digits, with a few clients at a time in memory.

    Raises:
        CheckpointError: something is missing or damaged.
    """
    layout, at_once = read_layout(run, round), count_clients_per_block(run, round)
    clients = np.flatnonzero(layout.file != layouts.NOWHERE)
    blocks = (clients[start : start + at_once] for start in range(0, len(clients), at_once))
    return digest_of_blocks(read_server(run, round), (read_clients_of_layout(run, layout, block) for block in blocks))


def count_clients_per_block(run: Path, round: int) -> int:
    """Returns how many clients to read at once where all clients of a round are read."""
    return clients_at_once(max(map(row_bytes, read_kinds(run, round).values()), default=0))


def row_bytes(leaves: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in leaves.values())


def _check_same_leaves(path: Path, rows: Arrays, others: Arrays) -> None:
    kinds, other_kinds = (
        {leaf: (array.shape[1:], array.dtype) for leaf, array in arrays.items()} for arrays in (rows, others)
    )
    if kinds != other_kinds:
        raise CheckpointError(f"{path} is not what the round file expects: its leaves differ from the other shards'")
