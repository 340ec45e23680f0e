"""RUN/modules.h5: what the state dicts of torch modules from outside have, by the number of the model.

A checkpoint has what is trained; constants, and the names of what is tied, are written once, so that a state dict can
be put together without the module's code.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from pflmpi.store import checked_hdf5
from pflmpi.store.checked_hdf5 import Writing

CONSTANT = ""  # instead of a path in the model
Entries = tuple[dict[str, str], dict[str, np.ndarray]]  # paths in the model by name in the state dict, and constants


def path(run: Path) -> Path:
    """Where the file is."""
    return run / "modules.h5"


def write(run: Path, modules: Mapping[int, Entries]) -> None:
    """Write the entries of each model; nothing where no model is a module from outside."""
    if not modules:
        return

    def fill(writing: Writing) -> None:
        writing.about["modules"] = {number: paths for number, (paths, _) in modules.items()}
        for number, (_, constants) in modules.items():
            for name, array in constants.items():
                writing.write_dataset(f"{number}/{name}", array)

    checked_hdf5.write(path(run), fill)


def read(run: Path, number: int) -> Entries | None:
    """The entries of a model; None where the run has none of it, as runs of earlier versions do.

    Raises:
        CheckpointError: the file is damaged.
    """
    if not path(run).exists():
        return None
    with checked_hdf5.reading(path(run)) as file:
        entries = checked_hdf5.about(file)["modules"]
        if str(number) not in entries:
            return None
        paths = {str(name): str(place) for name, place in entries[str(number)].items()}
        constants = {
            name: checked_hdf5.read_dataset(file, f"{number}/{name}")
            for name, place in paths.items()
            if place == CONSTANT
        }
    return paths, constants
