"""Very many clients: four samples each, a personal head each, fifty in a round.

    python examples/many_clients.py examples/many_clients.npz 100000
    pflmpi run examples/many_clients.yaml --out runs/many --ranks 1

A million start in the same way, with -s training.participation=0.00005. A client that has not trained takes up nothing
of its own, in memory or in checkpoints; results/scale.md has seconds and bytes.
"""

import sys
from pathlib import Path

import numpy as np

SAMPLES, CLASSES, VALUES = 4, 10, 8


def write(path: Path, clients: int) -> None:
    """Write x [n, VALUES], y [n] and client [n]: points around the centre of a class, which half of the clients shift.

    So no model serves all, and a head of one's own is worth having.
    """
    rng = np.random.default_rng(0)
    centres, client = rng.normal(size=(CLASSES, VALUES)), np.repeat(np.arange(clients), SAMPLES)
    group = rng.integers(0, CLASSES, len(client))
    x = centres[group] + 0.5 * rng.normal(size=(len(client), VALUES))
    np.savez(path, x=x.astype(np.float32), y=(group + client % 2) % CLASSES, client=client)


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
