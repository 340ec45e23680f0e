"""Which rank writes whose rows of a checkpoint, and how the rows get there: few files, however many ranks there are."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from pflmpi.store.round_file import Templates
from pflmpi.store.shard import ClientRows
from pflmpi.transports.base import Transport

_OWN = 1 << 24  # bytes of changed rows from which on a rank writes a shard of its own
_SHARED = 1 << 26  # bytes of rows of several ranks in a shard, at most


def row_bytes(templates: Templates, cohort: np.ndarray) -> np.ndarray:
    """Bytes [N] of what each client keeps.

    Args:
        templates: of all cohorts, in order; see `store.round_file.write_round`.
        cohort: [N] the cohort of each client.
    """
    sizes = [_bytes_of_row(leaves) for leaves in templates.values()]
    return np.asarray(np.array(sizes, np.int64)[cohort])


def shard_writers(sizes: Sequence[int], hosts: Sequence[str]) -> list[int]:
    """The rank that writes the rows of each rank: one of its node for those that have few, else the rank itself.

    Args:
        sizes: bytes of each rank's rows.
        hosts: name of each rank's node.

    >>> shard_writers([5, 0, _OWN, 7, 7], ["a", "a", "a", "a", "b"])
    [0, 1, 2, 0, 4]
    """
    writers, first, total = list(range(len(sizes))), dict[str, int](), dict[str, int]()
    for rank, (size, host) in enumerate(zip(sizes, hosts, strict=True)):
        if not 0 < size < _OWN:
            continue
        if host not in first or total[host] + size > _SHARED:
            first[host], total[host] = rank, 0
        writers[rank], total[host] = first[host], total[host] + size
    return writers


def clients_written(clients: Sequence[np.ndarray], writers: Sequence[int]) -> list[np.ndarray]:
    """The ascending ids of the clients whose rows each rank writes, from those whose state lives on each rank."""
    parts: dict[int, list[np.ndarray]] = {}
    for rank, ids in enumerate(clients):
        if len(ids):  # of many ranks few have any
            parts.setdefault(writers[rank], []).append(ids)
    nothing = np.empty(0, np.int64)
    return [np.sort(np.concatenate(parts[rank])) if rank in parts else nothing for rank in range(len(clients))]


def send_to_writers(
    transport: Transport,
    rows: ClientRows,
    clients: Sequence[np.ndarray],
    writers: Sequence[int],
    templates: Templates,
    cohort: np.ndarray,
) -> ClientRows:
    """The rows that this rank writes, once every rank has sent its own to their writer; all ranks call this.

    Args:
        rows: of the clients that live here.
        clients: of each rank, the ids of these.
        writers: of each rank, see `shard_writers`.
        templates, cohort: see `row_bytes`.
    """
    sizes = row_bytes(templates, cohort)
    sent = {rank: int(sizes[clients[rank]].sum()) for rank, writer in enumerate(writers) if writer != rank}
    if not sent:
        return rows
    writer = writers[transport.rank]
    parts = {} if writer == transport.rank else {writer: _packed(rows)}
    expected = {rank: size for rank, size in sent.items() if writers[rank] == transport.rank}
    with transport.channel("checkpoint"):
        received = transport.exchange(parts, expected, sum(sent.values()))
    if parts:
        return {}
    return _merged([rows, *(_unpacked(received[rank], clients[rank], templates, cohort) for rank in expected)])


def _packed(rows: ClientRows) -> np.ndarray:
    """The bytes of all arrays, by cohort and then by path."""
    arrays = [leaves[path] for _, leaves in rows.values() for path in sorted(leaves)]
    return np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays])


def _unpacked(content: np.ndarray, clients: np.ndarray, templates: Templates, cohort: np.ndarray) -> ClientRows:
    """The rows of some clients from their bytes."""
    rows: ClientRows = {}
    start = 0
    for number, (name, leaves) in enumerate(templates.items()):
        ids = clients[cohort[clients] == number]
        if not len(ids) or not leaves:
            continue
        arrays = {}
        for path, (shape, dtype) in sorted(leaves.items()):
            end = start + len(ids) * math.prod(shape) * dtype.itemsize
            arrays[path] = content[start:end].view(dtype).reshape(len(ids), *shape)
            start = end
        rows[name] = ids, arrays
    return rows


def _merged(parts: Sequence[ClientRows]) -> ClientRows:
    """The rows of several ranks as those of one, ascending by client; of one rank they are not copied."""
    if len(parts) == 1:
        return parts[0]
    merged: ClientRows = {}
    for cohort in sorted({cohort for part in parts for cohort in part}):
        of_cohort = [part[cohort] for part in parts if cohort in part]
        clients = np.concatenate([ids for ids, _ in of_cohort])
        order = np.argsort(clients, kind="stable")
        paths = of_cohort[0][1]
        leaves = {path: np.concatenate([arrays[path] for _, arrays in of_cohort])[order] for path in paths}
        merged[cohort] = clients[order], leaves
    return merged


def _bytes_of_row(leaves: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in leaves.values())
