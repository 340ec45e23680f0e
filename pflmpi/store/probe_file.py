"""RUN/probe_NNNNN.h5: similarity (CKA) of the layers of the clients' models of a round, and their confusion matrix."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pflmpi.errors import CheckpointError
from pflmpi.store import checked_hdf5
from pflmpi.store.checked_hdf5 import HDF5Writer
from pflmpi.store.config_file import run_id

_NAME = re.compile(r"probe_(\d{5,})\.h5")


@dataclass(frozen=True, eq=False)
class LayerSimilarity:
    """CKA of one layer between clients."""

    clients: np.ndarray  # [m] ascending ids of the clients that have the layer
    cka: np.ndarray  # [m, m] float64


@dataclass(frozen=True, eq=False)
class Probe:
    """Layer similarities and errors of the models of a round.

    Attributes:
        samples: number of samples in the batch.
        layers: by name, in forward order.
        confusion: [K, K] int64, test samples of all clients by true and predicted class; None where labels are not
            classes.
    """

    round: int
    samples: int
    layers: Mapping[str, LayerSimilarity]
    confusion: np.ndarray | None = None


def path(run: Path, round: int) -> Path:
    """Returns the path of the probe file of a round.

    >>> path(Path("run"), 12).name
    'probe_00012.h5'
    """
    return run / f"probe_{round:05d}.h5"


def rounds(run: Path) -> list[int]:
    return sorted(number for file in run.iterdir() if (number := round_of(file.name)) is not None)


def round_of(name: str) -> int | None:
    """Returns the round in the name of a probe file; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def write(run: Path, probe: Probe) -> None:
    """Write the probe of a round, replacing an older one; raises as `atomic.replacing`."""

    def fill(writer: HDF5Writer) -> None:
        names = {f"layers/{number:03d}": name for number, name in enumerate(probe.layers)}
        writer.about |= {"round": probe.round, "samples": probe.samples, "run": run_id(run), "layers": names}
        for place, name in names.items():
            writer.write_dataset(f"{place}/client", probe.layers[name].clients)
            writer.write_dataset(f"{place}/cka", probe.layers[name].cka)
        if probe.confusion is not None:
            writer.write_dataset("confusion", probe.confusion)

    checked_hdf5.write(path(run, probe.round), fill)


def find_damage(run: Path, round: int) -> str | None:
    """Returns why the probe of a round is not as written, or belongs to another round or run; None if all is well."""
    if problem := checked_hdf5.find_damage(path(run, round)):
        return problem
    try:
        with checked_hdf5.reading(path(run, round)) as file:
            about = checked_hdf5.read_about(file)
            recorded_round, recorded_run = int(about["round"]), about["run"]
            int(about["samples"]), about["layers"].items()  # which `read` needs
    except CheckpointError as error:
        return str(error)
    if recorded_round != round:
        return f"{path(run, round)} is the probe of round {recorded_round}"
    if recorded_run != run_id(run):
        return f"{path(run, round)} belongs to run {recorded_run}, and this is run {run_id(run)}"
    return None


def read(run: Path, round: int) -> Probe:
    """Reads the probe of a round; `CheckpointError` if it is missing, damaged or in another format."""
    if problem := find_damage(run, round):
        raise CheckpointError(f"{problem}; delete it, or make it again with `pflmpi probe {run} --round {round}`")
    with checked_hdf5.reading(path(run, round)) as file:
        about = checked_hdf5.read_about(file)
        layers = {
            str(name): LayerSimilarity(
                checked_hdf5.read_dataset(file, f"{place}/client"), checked_hdf5.read_dataset(file, f"{place}/cka")
            )
            for place, name in about["layers"].items()
        }
        confusion = checked_hdf5.read_dataset(file, "confusion") if "confusion" in file else None
        return Probe(int(about["round"]), int(about["samples"]), layers, confusion)
