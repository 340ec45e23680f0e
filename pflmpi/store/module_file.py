"""RUN/modules.h5: what the state dicts of torch modules from outside have, by the number of the model.

A checkpoint has what is trained; constants, and the names of what is tied, are written once, so that a state dict can
be put together without the module's code.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from pflmpi.errors import CheckpointError
from pflmpi.store import checked_hdf5
from pflmpi.store.hdf5 import File, write_attribute, write_group

CONSTANT = ""  # instead of a path in the model
Entries = tuple[dict[str, str], dict[str, np.ndarray]]  # paths in the model by name in the state dict, and constants


def path(run: Path) -> Path:
    """Where the file is."""
    return run / "modules.h5"


def write(run: Path, modules: Mapping[int, Entries]) -> None:
    """Write the entries of each model; nothing where no model is a module from outside."""
    if not modules:
        return

    def fill(file: File) -> None:
        for number, (paths, constants) in modules.items():
            group = write_group(file.id, str(number))
            write_attribute(group.id, "entries", json.dumps(paths))
            for name, array in constants.items():
                checked_hdf5.put(group, name, array)

    checked_hdf5.write(path(run), fill)


def read(run: Path, number: int) -> Entries | None:
    """The entries of a model; None where the run has none of it, as runs of earlier versions do.

    Raises:
        CheckpointError: the file is damaged.
    """
    if not path(run).exists():
        return None
    with checked_hdf5.reading(path(run)) as file:
        if str(number) not in file:
            return None
        group = file[str(number)]
        try:
            paths = {str(name): str(place) for name, place in json.loads(group.attrs["entries"]).items()}
        except (KeyError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path(run)} is damaged: it has no entries of model {number}") from error
        constants = {name: checked_hdf5.get(group, name) for name, place in paths.items() if place == CONSTANT}
    return paths, constants
