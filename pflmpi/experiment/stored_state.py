"""The state after a round of a run, from its checkpoint."""

from pathlib import Path

import numpy as np

from pflmpi.messages.chosen import OfferedRows
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


def offered(ready: Setup, run: Path, round: int) -> OfferedRows:
    """What clients offer; see `Offers`."""
    return lambda name, offer, clients: population(ready, run, round, clients).offered(name, offer, clients)
