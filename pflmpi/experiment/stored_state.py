"""The state after a round of a run, from its checkpoint."""

from pathlib import Path

import numpy as np

from pflmpi.messages.downlink import KeptRows
from pflmpi.runtime.client_state import Population, allocate, from_flat
from pflmpi.runtime.setup import Setup
from pflmpi.store import run_folder
from pflmpi.tree import Tree


def server(run: Path, round: int) -> Tree:
    """The server's state."""
    return from_flat(run_folder.read_server(run, round))


def population(ready: Setup, run: Path, round: int, clients: np.ndarray) -> Population:
    """Some clients [m], ascending, with their state."""
    found = allocate(ready.executor.cohort, clients, ready.templates)
    for piece, arrays in run_folder.read_pieces(run, round, clients):
        found.restore(piece, arrays)
    return found


def kept(ready: Setup, run: Path, round: int) -> KeptRows:
    """The rows that clients keep for others; see `Homes`."""
    return lambda name, like, clients: population(ready, run, round, clients).kept(name, like, clients)
