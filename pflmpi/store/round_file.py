"""The round file, which rank 0 writes once all shards of a round are on disk: it turns them into a checkpoint."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pflmpi.store import checked_hdf5, metrics_file
from pflmpi.store import layout as layouts
from pflmpi.store.checked_hdf5 import CLASS_NAMES, Checksum, Description, HDF5Writer
from pflmpi.store.descriptions import Descriptions
from pflmpi.store.hdf5 import h5py, write_group
from pflmpi.store.layout import Layout
from pflmpi.store.names import round_path
from pflmpi.store.shard import Arrays
from pflmpi.store.virtual_rows import VirtualRows, write_virtual_rows

Templates = Mapping[str, Mapping[str, tuple[tuple[int, ...], np.dtype]]]

_CONTENT_DESCRIPTION = (
    "the state of the clients lies in the folder shards/ beside this file, and shows as `missing` says without it; "
    "copy the folder of the run as a whole, or write one file: `pflmpi export RUN --round {round} --all -o one.h5`"
)


@dataclass(frozen=True, eq=False)
class ReceivedMessage:
    """A message as received by all clients."""

    arrays: Arrays  # by path; [N, ...] in client order with `own`
    own: bool  # whether each client has its own row


@dataclass(frozen=True, eq=False)
class RoundContent:
    """What rank 0 stores of a round; the clients' rows are in the shards.

    Attributes:
        server: the server's state by path.
        metrics: by name; see `descriptions.METRICS`.
        bytes: traffic by name; see `descriptions.BYTES`.
        received: messages by name from which personal models are assembled and that clients do not keep. An array that
            is the same object as one in `server` is stored as a link to it.
        diagnostics: measured values by name.
        partition: samples of each client, by name; see `descriptions.PARTITION`.
        normalisation: `mean` and `std` [C]: models take (x - mean) / std, where x of bytes is divided by 255 before.
        metrics_file: checksum of metrics.csv after the round.
    """

    round: int
    server: Arrays
    metrics: Arrays = field(default_factory=dict)
    bytes: Arrays = field(default_factory=dict)
    received: Mapping[str, ReceivedMessage] = field(default_factory=dict)
    diagnostics: Arrays = field(default_factory=dict)
    partition: Arrays = field(default_factory=dict)
    normalisation: Arrays = field(default_factory=dict)
    metrics_file: Checksum = metrics_file.EMPTY


def write_round(
    run: Path,
    content: RoundContent,
    layout: Layout,
    templates: Templates,
    attributes: Mapping[str, str | int | float],
    known_checksums: Mapping[str, Checksum] | None = None,
) -> dict[str, Checksum]:
    """Write the round file; every shard that the layout names must already be on disk.

    Args:
        layout: where each client's row is; clients of a cohort that keeps nothing have none.
        templates: for each cohort, path -> (shape, dtype) of one client's state; empty for a cohort that keeps nothing.
        known_checksums: of shards, by name; those of the others are read from their heads.

    Returns:
        The checksums of all shards of the layout, by name.

    Raises:
        OSError: the file could not be written; see `atomic.replacing`.
        CheckpointError: a shard is missing or damaged.
    """
    keeping = [cohort for cohort in sorted(layout.cohorts) if templates[cohort]]
    for cohort in keeping:
        missing = layout.cohorts[cohort][layout.file[layout.cohorts[cohort]] == layouts.NOWHERE]
        assert not len(missing), f"round {content.round}: client {missing[0]} of {cohort} was never written"

    known = known_checksums or {}
    checksums = {name: known.get(name) or checked_hdf5.recorded_checksum(run / name) for name in layout.files}
    descriptions = Descriptions(json.loads(str(attributes.get("diagnostics", "{}"))), "modules" in attributes)

    def fill(writer: HDF5Writer) -> None:
        writer.about["content"] = "index"
        writer.about["content_description"] = _CONTENT_DESCRIPTION.format(round=content.round)
        writer.about["run"] = {"round": content.round, **attributes}
        writer.about["metrics_csv"] = list(content.metrics_file)
        writer.about["shards"] = {name: list(checksum) for name, checksum in checksums.items()}
        writer.about["cohorts"] = list(layout.cohorts)
        writer.write_coordinates("round", np.array([content.round]), "number of the round")
        writer.write_coordinates("client", np.arange(len(layout.file)), "ids of the clients")
        if class_names := json.loads(str(attributes.get("class_names", "[]"))):
            writer.write_coordinates(CLASS_NAMES, class_names, "names of the classes")
        _write_sections(writer, content, descriptions)
        for name, array in layouts.arrays(layout).items():
            writer.write_dataset(f"layout/{name}", array, descriptions.figure("layout", name))
        write_group(writer.file.id, "clients")
        for cohort in keeping:
            _write_clients(writer, cohort, layout, templates[cohort], descriptions)

    messages = [message.arrays for message in content.received.values()]
    size = sum(array.nbytes for arrays in (content.server, content.metrics, *messages) for array in arrays.values())
    checked_hdf5.write(round_path(run, content.round), fill, size)
    return checksums


def _write_clients(
    writer: HDF5Writer,
    cohort: str,
    layout: Layout,
    templates: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    descriptions: Descriptions,
) -> None:
    """Store the clients of a cohort as virtual arrays; one of several cohorts has a group and an axis of its own.

    That axis is not called `client` too: xarray refuses a second scale of that name below the first.
    """
    group, axis = "clients", "client"
    if len(layout.cohorts) > 1:
        assert "client" not in templates, "a leaf may not be called client: the ids are stored there"
        group, axis = f"clients/{cohort}", f"{cohort}_client"
        ids, text = layout.cohorts[cohort], "ids of the clients of the cohort"
        writer.write_coordinates(axis, ids, text)
        writer.write_dataset(f"{group}/client", ids, Description("", (axis,), text))
    rows = VirtualRows(cohort, layout)
    for path, template in sorted(templates.items()):
        description = descriptions.client(path, axis)
        write_virtual_rows(writer, f"{group}/{path}", f"/{cohort}/rows/{path}", template, rows, description)


def _write_sections(writer: HDF5Writer, content: RoundContent, descriptions: Descriptions) -> None:
    """Store all but the clients' state; single numbers go into `about`."""
    if "participants" in content.metrics:
        text = descriptions.figure("metrics", "participants")[2]
        writer.write_coordinates("participant", content.metrics["participants"], text)
    for section in ("metrics", "bytes", "partition"):
        writer.about[section] = {}
        for name, array in getattr(content, section).items():
            if not array.ndim:
                value = array.item()
                writer.about[section][name] = None if value != value else value  # JSON has no NaN
            elif name != "participants":
                writer.write_dataset(f"{section}/{name}", array, descriptions.figure(section, name))
    for name, array in content.diagnostics.items():
        writer.write_dataset(f"diagnostics/{name}", array, descriptions.diagnostic(name))
    writer.about["normalisation"] = {name: array.tolist() for name, array in content.normalisation.items()}
    write_group(writer.file.id, "server")
    for path, array in sorted(content.server.items()):
        writer.write_dataset(f"server/{path}", array, descriptions.server(path))
    _write_received(writer, content, descriptions)


def _write_received(writer: HDF5Writer, content: RoundContent, descriptions: Descriptions) -> None:
    """Store the messages; arrays that are in `server` too become links."""
    server_paths, arrays = {id(array): path for path, array in content.server.items()}, writer.about["arrays"]
    writer.about["own"] = {name: message.own for name, message in sorted(content.received.items())}
    for name, message in sorted(content.received.items()):
        group = write_group(writer.file.id, f"received/{name}")
        for path, array in sorted(message.arrays.items()):
            if id(array) in server_paths:
                server_path = f"server/{server_paths[id(array)]}"
                group[path] = h5py.SoftLink(f"/{server_path}")
                arrays[f"received/{name}/{path}"] = arrays[server_path]
            else:
                writer.write_dataset(f"received/{name}/{path}", array, descriptions.received(name, path, message.own))
