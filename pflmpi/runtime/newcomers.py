"""What newcomers have of kept messages: the mean over all clients."""

import numpy as np

from pflmpi import tree
from pflmpi.messages.deliver import deliver, delivery
from pflmpi.messages.kinds import Messages
from pflmpi.messages.packing import pack, unpack
from pflmpi.messages.traffic import Traffic
from pflmpi.runtime.client_state import Population
from pflmpi.runtime.contract import ANSWERED, answer_templates
from pflmpi.runtime.setup import Setup
from pflmpi.transports.base import Transport


def mean_answers(setup: Setup, transport: Transport, population: Population) -> Messages:
    """The plain mean over all clients of each kept message; rank 0 has one leaf of all clients at a time."""
    if not (like := answer_templates(setup.algorithm, setup.task)):
        return {}
    wanted, home = _everyone_on_server(setup)
    means = {}
    with transport.channel("data"):
        for path, leaf in tree.leaves(like):

            def rows(clients: np.ndarray, path: str = path) -> tree.Tree:
                return {"leaf": population.leaf(f"{ANSWERED}/{path}", clients)}

            everyone = tree.leaf(deliver(transport, wanted, home, rows, {"leaf": leaf}, down=False), "leaf")
            means[path] = everyone.double().mean(0).to(leaf.dtype)  # of nobody on other ranks, where it is not used
        buffer = pack(tree.unflatten(means))
        transport.broadcast(buffer)
    return unpack(buffer, like)  # type: ignore[return-value]


def mean_calls(setup: Setup) -> list[Traffic]:
    """The calls of `mean_answers`."""
    if not (like := answer_templates(setup.algorithm, setup.task)):
        return []
    wanted, home = _everyone_on_server(setup)
    calls = [delivery(wanted, home, {"leaf": leaf}, down=False) for _, leaf in tree.leaves(like)]
    return [*calls, Traffic.broadcast(tree.num_bytes(like), setup.placement.ranks)]


def _everyone_on_server(setup: Setup) -> tuple[list[np.ndarray], np.ndarray]:
    """What `deliver` needs to bring the rows of all clients to rank 0: who wants which, and where they live."""
    home = setup.placement.home
    assert home is not None, "clients that keep messages have a home"
    return [np.arange(len(home)), *[np.empty(0, np.int64)] * (setup.placement.ranks - 1)], home
