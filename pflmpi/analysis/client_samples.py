"""The samples of one client."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from pflmpi.data.federation import Federation
from pflmpi.errors import CheckpointError


class Samples(NamedTuple):
    """Samples [m, ...], bytes or numbers before normalisation, and their classes [m]."""

    x: np.ndarray
    y: np.ndarray


class ClientSamples(NamedTuple):
    """What a client trains on, and what it is tested on."""

    train: Samples
    test: Samples


def client_samples(run: Path, federation: Federation, client: int) -> ClientSamples:
    """Copies of the samples of a client; `CheckpointError` where the run has no such client."""
    if not 0 <= client < federation.num_clients:
        raise CheckpointError(f"{run} has clients 0 to {federation.num_clients - 1}; client {client} was requested")
    images, labels = federation.dataset.images, federation.dataset.labels
    train, test = (np.sort(rows[client]) for rows in (federation.train, federation.test))
    return ClientSamples(Samples(images[train], labels[train]), Samples(images[test], labels[test]))
