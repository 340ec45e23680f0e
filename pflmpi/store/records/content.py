"""What the record of a rank holds: rows of its clients and, of rank 0, all that the round file needs besides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pflmpi.errors import CheckpointError
from pflmpi.store import layout as layouts
from pflmpi.store.checked_hdf5 import Checksum
from pflmpi.store.layout import Layout
from pflmpi.store.records.record import Record
from pflmpi.store.round_file import ReceivedMessage, RoundContent, Templates
from pflmpi.store.shard import Arrays, ClientRows

Attributes = Mapping[str, str | int]

_SECTIONS = ("server", "metrics", "bytes", "diagnostics", "partition", "normalisation")


@dataclass(frozen=True)
class Checkpoint:
    """What rank 0 knows of a checkpoint.

    Attributes:
        content: of the round file.
        layout: where each client's row is.
        templates: see `round_file.write_round`.
        attributes: of the round file.
        ranks: whose records hold the rows of a shard, by its name; a shard that is not named is written by its rank.
        keep: how many of the newest rounds stay; 0 for all.
    """

    content: RoundContent
    layout: Layout
    templates: Templates
    attributes: Attributes
    ranks: Mapping[str, Sequence[int]]
    keep: int


def pack(round: int, rows: ClientRows, checkpoint: Checkpoint | None = None) -> Record:
    """The record of a rank.

    Args:
        rows: of its clients, as `shard.write_shard` takes them.
        checkpoint: rank 0's.
    """
    arrays: Arrays = {}
    for cohort, (clients, leaves) in rows.items():
        arrays |= {f"client/{cohort}": clients, **{f"rows/{cohort}/{leaf}": leaves[leaf] for leaf in leaves}}
    if checkpoint is None:
        return Record(round, {}, arrays)
    content = checkpoint.content
    for section in _SECTIONS:
        arrays |= {f"{section}/{path}": array for path, array in getattr(content, section).items()}
    for name, message in content.received.items():
        arrays |= {f"received/{name}/{path}": array for path, array in message.arrays.items()}
        if message.chosen is not None:
            arrays[f"chosen/{name}"] = message.chosen
    arrays |= {f"layout/{path}": array for path, array in layouts.arrays(checkpoint.layout).items()}
    about = {
        "received": {name: message.own for name, message in content.received.items()},
        "ranks": {name: list(ranks) for name, ranks in checkpoint.ranks.items()},
        "keep": checkpoint.keep,
        "metrics_csv": list(content.metrics_file),
        "shards": list(checkpoint.layout.files),
        "cohorts": list(checkpoint.layout.cohorts),
        "attributes": dict(checkpoint.attributes),
        "templates": {
            cohort: {path: [shape, dtype.str] for path, (shape, dtype) in leaves.items()}
            for cohort, leaves in checkpoint.templates.items()
        },
    }
    return Record(round, about, arrays)


def rows_of(record: Record) -> ClientRows:
    """The rows of the clients in a record."""
    found: ClientRows = {}
    for name, clients in _below(record, "client/").items():
        found[name] = (clients, _below(record, f"rows/{name}/"))
    return found


def checkpoint_of(record: Record) -> Checkpoint:
    """What a record of rank 0 holds."""
    about = record.about
    received = {
        name: ReceivedMessage(_below(record, f"received/{name}/"), own, record.arrays.get(f"chosen/{name}"))
        for name, own in about["received"].items()
    }
    sections = {section: _below(record, f"{section}/") for section in _SECTIONS}
    places = _below(record, "layout/")
    try:
        files = layouts.names_of_shards(dict.fromkeys(about["shards"]))
    except ValueError as error:
        raise CheckpointError(f"the record of round {record.round} cannot be read: {error}; delete it") from error
    cohorts = {name: np.flatnonzero(places["cohort"] == number) for number, name in enumerate(about["cohorts"])}
    templates = {
        cohort: {path: (tuple(shape), np.dtype(kind)) for path, (shape, kind) in leaves.items()}
        for cohort, leaves in about["templates"].items()
    }
    return Checkpoint(
        RoundContent(record.round, received=received, metrics_file=Checksum(*about["metrics_csv"]), **sections),
        Layout(cohorts, places["file"], places["row"], files),
        templates,
        about["attributes"],
        about["ranks"],
        about["keep"],
    )


def merged(parts: Sequence[ClientRows]) -> ClientRows:
    """The rows of several ranks as those of one, ascending by client; of one rank they are not copied."""
    if len(parts) == 1:
        return parts[0]
    found: ClientRows = {}
    for cohort in sorted({cohort for part in parts for cohort in part}):
        there = [part[cohort] for part in parts if cohort in part]
        clients = np.concatenate([ids for ids, _ in there])
        order = np.argsort(clients, kind="stable")
        leaves = {leaf: np.concatenate([each[leaf] for _, each in there])[order] for leaf in there[0][1]}
        found[cohort] = (clients[order], leaves)
    return found


def _below(record: Record, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in record.arrays.items() if name.startswith(prefix)}
