"""How long the ranks need to talk in a round, from the calls that they make and the network between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pflmpi.forecast import gloo, open_mpi
from pflmpi.forecast.network import Network, NetworkSimulator

Operation = Literal["broadcast", "scatter", "gather", "maximum", "sum"]
_ROUNDS = 4  # ranks come to a round as late as the last one let them go, so more than one is looked at


@dataclass(frozen=True)
class Call:
    """One call of a transport.

    Attributes:
        operation: its name.
        sizes: [R] bytes of each rank's buffer or part.
    """

    operation: Operation
    sizes: tuple[int, ...]


def communication_seconds(
    calls: Sequence[Call], network: Network, transport: Literal["inprocess", "mpi", "torch"]
) -> float:
    """Return the seconds that the calls of one round take, in a run of many rounds.

    Args:
        calls: those of a round, in order.
        network: the ranks and the links between them.
        transport: how they are moved.
    """
    if network.ranks == 1 or transport == "inprocess":
        return 0.0
    clocks = NetworkSimulator(network)
    ends = []
    for _ in range(_ROUNDS):
        for call in calls:
            _make(clocks, call, transport)
        ends.append(float(clocks.now.max()))
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def _make(clocks: NetworkSimulator, call: Call, transport: Literal["mpi", "torch"]) -> None:
    sizes = np.array(call.sizes, np.int64)
    if call.operation in ("scatter", "gather"):
        others = np.flatnonzero(sizes[1:] > 0) + 1
        root = np.zeros_like(others)
        ends = (root, others) if call.operation == "scatter" else (others, root)
        (open_mpi if transport == "mpi" else gloo).exchange(clocks, *ends, sizes[others])
        return
    size = int(sizes[0])
    if size == 0:
        return
    if transport == "mpi":
        {"broadcast": open_mpi.broadcast, "maximum": open_mpi.maximum, "sum": open_mpi.total}[call.operation](
            clocks, size
        )
    else:
        {"broadcast": gloo.broadcast, "maximum": gloo.everywhere, "sum": gloo.total}[call.operation](clocks, size)
