"""The round file, which rank 0 writes once all shards of a round are on disk: it turns them into a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from pflmpi.store import checked_hdf5, joined
from pflmpi.store import layout as layouts
from pflmpi.store.checked_hdf5 import Checksum
from pflmpi.store.descriptions import describe
from pflmpi.store.hdf5 import File, h5py, write_attribute, write_group
from pflmpi.store.layout import Layout
from pflmpi.store.metrics.history import NO_HISTORY, History
from pflmpi.store.names import round_path
from pflmpi.store.shard import Arrays

__all__ = ["Layout", "ReceivedMessage", "RoundContent", "Templates", "write_round"]

Templates = Mapping[str, Mapping[str, tuple[tuple[int, ...], np.dtype]]]

_OWN_ATTRIBUTES = ("format_version", "round", "content", "content_description")
_INDEX = (
    "the state of the clients lies in the folder shards/ beside this file, and shows as `missing` says without it; "
    "copy the folder of the run as a whole, or write one file: `pflmpi export RUN --round {round} --all -o one.h5`"
)


@dataclass(frozen=True, eq=False)
class ReceivedMessage:
    """A message as received by all clients.

    Attributes:
        arrays: by path; [N, ...] in client order with `own`.
        own: whether each client has its own row.
        chosen: [N] which row of `arrays` each client has, where these hold only a few; None where they hold all.
    """

    arrays: Arrays
    own: bool
    chosen: np.ndarray | None = None

    def expanded(self) -> "ReceivedMessage":
        """The same with a row for each client."""
        if self.chosen is None:
            return self
        return ReceivedMessage({path: array[self.chosen] for path, array in self.arrays.items()}, self.own)


@dataclass(frozen=True, eq=False)
class RoundContent:
    """What rank 0 stores of a round; the clients' rows are in the shards.

    Attributes:
        round: its number.
        server: the server's state by path.
        metrics: figures of the round by name; see `descriptions.METRICS`.
        bytes: its traffic by name; see `descriptions.BYTES`.
        received: messages by name that personal models are assembled from and clients do not keep. An array that is
            the same object as one in `server` is stored as a link to it.
        diagnostics: measured values by name.
        partition: samples of each client, by name; see `descriptions.PARTITION`.
        normalisation: how samples are normalised, by name; see `descriptions.NORMALISATION`.
        history: of metrics.csv after the round, so that a damaged one can be restored.
    """

    round: int
    server: Arrays
    metrics: Arrays = field(default_factory=dict)
    bytes: Arrays = field(default_factory=dict)
    received: Mapping[str, ReceivedMessage] = field(default_factory=dict)
    diagnostics: Arrays = field(default_factory=dict)
    partition: Arrays = field(default_factory=dict)
    normalisation: Arrays = field(default_factory=dict)
    history: History = NO_HISTORY


def write_round(
    run: Path,
    content: RoundContent,
    layout: Layout,
    templates: Templates,
    attributes: Mapping[str, str | int | float],
    checksums: Mapping[str, Checksum] | None = None,
) -> dict[str, Checksum]:
    """Write the round file; every shard that the layout names must already be on disk.

    Args:
        layout: where each client's row is; clients of a cohort that keeps nothing are stored as having no row.
        templates: for each cohort, path -> (shape, dtype) of one client's state; empty for a cohort that keeps nothing.
        checksums: of the shards, by name, as far as known; the others are read.

    Returns:
        The checksums of these shards by name.

    Raises:
        OSError: the file could not be written; see `atomic.replacing`.
        CheckpointError: a shard is missing or damaged.
    """
    content = replace(content, received={name: message.expanded() for name, message in content.received.items()})
    keeping = [cohort for cohort in sorted(layout.cohorts) if templates[cohort]]
    layout = layout.only(keeping)
    for cohort in keeping:
        lost = layout.cohorts[cohort][layout.file[layout.cohorts[cohort]] == layouts.NOWHERE]
        assert not len(lost), f"round {content.round}: client {lost[0]} of {cohort} was never written"
    assert not set(attributes) & set(_OWN_ATTRIBUTES), f"{_OWN_ATTRIBUTES} are set here"

    known = checksums or {}
    shards = {name: known.get(name) or checked_hdf5.recorded_checksum(run / name) for name in layout.files}

    def fill(file: File) -> None:
        for name, value in {"round": content.round, **attributes}.items():
            write_attribute(file.id, name, value)
        write_attribute(file.id, "content", "index")
        write_attribute(file.id, "content_description", _INDEX.format(round=content.round))
        sections = {
            "server": content.server,
            "metrics": content.metrics,
            "bytes": content.bytes,
            "diagnostics": content.diagnostics,
            "partition": content.partition,
            "normalisation": content.normalisation,
        }
        arrays = {f"{section}/{path}": array for section, each in sections.items() for path, array in each.items()}
        arrays |= {"history": content.history.lines, **_put_received(file, content)}
        arrays |= {f"layout/{path}": array for path, array in layouts.arrays(layout).items()}
        arrays["layout/bytes"] = np.array([each.bytes for each in shards.values()], np.int64)
        arrays["layout/crc32"] = np.array([each.crc32 for each in shards.values()], np.int64)
        datasets = {}
        for section in (*sections, "layout", "clients"):
            write_group(file.id, section)
        for cohort in keeping:
            place, rows = "clients", joined.Joined.of(cohort, layout)
            if len(layout.cohorts) > 1:
                assert "client" not in templates[cohort], "a leaf may not be called client: the ids are stored there"
                place = f"clients/{cohort}"
                arrays[f"{place}/client"] = layout.cohorts[cohort]
            for path, (shape, dtype) in sorted(templates[cohort].items()):
                source = f"/{cohort}/rows/{path}"
                datasets[f"{place}/{path}"] = joined.join(file, f"{place}/{path}", source, shape, dtype, rows)
        datasets |= {path: checked_hdf5.put(file, path, arrays[path]) for path in sorted(arrays)}
        for name, value in content.history.before._asdict().items():
            write_attribute(datasets["history"], f"{name}_before", value)
        describe(file, datasets, several_cohorts=len(layout.cohorts) > 1)

    messages = [message.arrays for message in content.received.values()]
    size = sum(array.nbytes for arrays in (content.server, content.metrics, *messages) for array in arrays.values())
    checked_hdf5.write(round_path(run, content.round), fill, size)
    return shards


def _put_received(file: File, content: RoundContent) -> Arrays:
    """Store the groups of messages, and links to what is in `server` too; the other arrays by path."""
    paths, arrays = {id(array): path for path, array in content.server.items()}, {}
    write_group(file.id, "received")
    for name, message in sorted(content.received.items()):
        group = write_group(file.id, f"received/{name}")
        write_attribute(group.id, "own", message.own)
        for path, array in sorted(message.arrays.items()):
            if id(array) in paths:
                group[path] = h5py.SoftLink(f"/server/{paths[id(array)]}")
            else:
                arrays[f"received/{name}/{path}"] = array
    return arrays
