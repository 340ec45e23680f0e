"""What the state of a run takes: of each client, of the server, on each rank."""

from dataclasses import dataclass

import numpy as np
import torch

from pflmpi import tree
from pflmpi.learning.task import HOST
from pflmpi.run.build import Experiment, client_templates
from pflmpi.runtime.placement import Placement
from pflmpi.tree import Tree

_FEW = 3  # clients for which a server's state is made to see how it grows


@dataclass(frozen=True)
class StateSizes:
    """Bytes of what is kept between rounds.

    Attributes:
        client: [N] bytes of each client; what it keeps, and the reply that it is tested with where that is kept.
        server: by path, the number of values of a leaf and their type.
    """

    client: np.ndarray
    server: dict[str, tuple[int, np.dtype]]

    @property
    def server_bytes(self) -> int:
        """Bytes of the server's state."""
        return sum(count * dtype.itemsize for count, dtype in self.server.values())

    def hosted(self, placement: Placement) -> np.ndarray:
        """Return [R], the bytes of the clients that live on each rank."""
        return np.array([int(self.client[placement.hosted(rank)].sum()) for rank in range(placement.ranks)], np.int64)


def state_sizes(experiment: Experiment) -> StateSizes:
    """Return the sizes of the state of an experiment, without making it: for many clients it may not fit here."""
    each = np.array([tree.num_bytes(template) for template in client_templates(experiment)], np.int64)
    return StateSizes(each[experiment.cohort], _server(experiment))


def _server(experiment: Experiment) -> dict[str, tuple[int, np.dtype]]:
    """Return the leaves of the server's state: each has a fixed size, grows with the clients, or with their pairs."""
    n = experiment.federation.num_clients
    known = [n] if n <= _FEW else [_FEW, _FEW + 1, _FEW + 2]
    states = [dict(tree.leaves(_made(experiment, clients))) for clients in known]
    return {
        path: (_at(n, known, [state[path].numel() for state in states]), _dtype(leaf))
        for path, leaf in states[0].items()
    }


def _made(experiment: Experiment, clients: int) -> Tree:
    task = experiment.tasks[0].replace(device=HOST, num_clients=clients)
    return experiment.config.algorithm.init_server(task)


def _at(place: int, known: list[int], values: list[int]) -> int:
    """Return the value at a place of the parabola through known ones, or the only one that is known.

    >>> _at(10, [3, 4, 5], [9, 16, 25]), _at(10, [3, 4, 5], [7, 7, 7]), _at(2, [2], [8])
    (100, 7, 8)
    """
    if len(known) == 1:
        return values[0]
    first, step = values[0], values[1] - values[0]
    bend = values[2] - 2 * values[1] + values[0]
    far = place - known[0]
    return first + step * far + bend * (far * (far - 1) // 2)


def _dtype(leaf: torch.Tensor) -> np.dtype:
    return leaf.new_empty(0, device="cpu").numpy().dtype
