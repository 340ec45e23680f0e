"""Single arrays of the server's state; all of it may be a model for every client."""

import numpy as np

from pflmpi.analysis.run import Round
from pflmpi.store import checked_hdf5
from pflmpi.store.names import round_path


def server_shapes(state: Round) -> dict[str, tuple[int, ...]]:
    """Return the shape of each array that the server keeps, by path; none is read.

    Raises:
        CheckpointError: the round file is missing, damaged or of a newer format.
    """
    with checked_hdf5.reading(round_path(state.run, state.number)) as file:
        group = file["server"]
        return {path: tuple(group[path].shape) for path in checked_hdf5.names(group)}


def server_leaf(state: Round, path: str) -> np.ndarray | None:
    """Return one array of the server's state, None where it keeps none of that name; raises as `server_shapes`."""
    with checked_hdf5.reading(round_path(state.run, state.number)) as file:
        group = file["server"]
        return checked_hdf5.get(group, path) if path in group else None
