"""RUN/modules.h5: the state dict entries that are not trained, for each model.

Checkpoints have what is trained. Frozen parameters, constants and the names of tied parameters are written once, so
that a state dict can be assembled without the module's code. Values from a weights file stay in that file.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pflmpi.store import checked_hdf5
from pflmpi.store.checked_hdf5 import HDF5Writer

CONSTANT = ""  # in place of a path in the model
FROM_FILE = "weights"  # in place of a path in the model: the value is in the weights file


class WeightsFile(NamedTuple):
    """The file of `model.weights`, and its SHA-256 (hex)."""

    path: str
    sha256: str


class Entries(NamedTuple):
    """The state dict of a model."""

    paths: dict[str, str]  # path in the model, `CONSTANT` or `FROM_FILE`, by name in the state dict
    constants: dict[str, np.ndarray]  # by name
    weights: WeightsFile | None = None  # the file of the entries that are `FROM_FILE`; None where there are none


def path(run: Path) -> Path:
    return run / "modules.h5"


def write(run: Path, modules: Mapping[int, Entries]) -> None:
    """Write the entries of each model; nothing where there are none."""
    if not modules:
        return

    def fill(writer: HDF5Writer) -> None:
        writer.about["modules"] = {number: entries.paths for number, entries in modules.items()}
        writer.about["weights"] = {number: entries.weights for number, entries in modules.items() if entries.weights}
        for number, entries in modules.items():
            for name, array in entries.constants.items():
                writer.write_dataset(f"{number}/{name}", array)

    checked_hdf5.write(path(run), fill)


def sha256(path: str) -> str:
    """Computes the SHA-256 (hex) of a file; "" if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def read(run: Path, number: int) -> Entries | None:
    """Reads the entries of a model; None where the run has none, as for models of the package that train all arrays.

    Raises:
        CheckpointError: the file is damaged.
    """
    if not path(run).exists():
        return None
    with checked_hdf5.reading(path(run)) as file:
        about = checked_hdf5.read_about(file)
        if str(number) not in about["modules"]:
            return None
        paths = {str(name): str(place) for name, place in about["modules"][str(number)].items()}
        weights = about.get("weights", {}).get(str(number))
        constants = {
            name: checked_hdf5.read_dataset(file, f"{number}/{name}")
            for name, place in paths.items()
            if place == CONSTANT
        }
    return Entries(paths, constants, weights and WeightsFile(*map(str, weights)))
