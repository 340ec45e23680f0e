"""What newcomers receive of `Mixed` messages: the mean of what all clients have."""

import numpy as np
import torch

from pflmpi import tree
from pflmpi.messages.calls import Call
from pflmpi.messages.kinds import Messages, with_rows
from pflmpi.messages.packing import pack, unpack
from pflmpi.runtime.client_state import Population
from pflmpi.runtime.exchange.mixed import ANSWERED, mixed_templates
from pflmpi.runtime.setup import Setup
from pflmpi.transports.base import Transport


def mean_of_mixed(setup: Setup, transport: Transport, population: Population) -> Messages:
    """The plain mean over all clients of each `Mixed` message; rank 0 has one leaf of all clients at a time."""
    if not (like := mixed_templates(setup.algorithm, setup.task)):
        return {}
    hosted = [setup.placement.hosted(rank) for rank in range(transport.size)]
    means = {}
    with transport.channel("data"):
        for path, leaf in tree.leaves(like):
            here = pack({"leaf": population.leaf(f"{ANSWERED}/{path}", hosted[transport.rank])})
            size = leaf.nbytes
            parts = transport.gather(here, [size * len(clients) for clients in hosted])
            if parts is not None:
                rows = torch.empty(setup.task.num_clients, *leaf.shape, dtype=leaf.dtype)
                for clients, part in zip(hosted, parts, strict=True):
                    rows[torch.from_numpy(clients)] = tree.leaf(
                        unpack(part, with_rows({"leaf": leaf}, len(clients))), "leaf"
                    )
                means[path] = rows.double().mean(0).to(leaf.dtype)
        buffer = pack(tree.unflatten(means)) if transport.rank == 0 else np.empty(tree.num_bytes(like), np.uint8)
        transport.broadcast(buffer)
    return unpack(buffer, like)  # type: ignore[return-value]


def mean_calls(setup: Setup) -> list[Call]:
    """The collective calls of `mean_of_mixed`, with the bytes of each rank."""
    if not (like := mixed_templates(setup.algorithm, setup.task)):
        return []
    ranks = setup.placement.ranks
    counts = [len(setup.placement.hosted(rank)) for rank in range(ranks)]
    sizes = (leaf.nbytes for _, leaf in tree.leaves(like))
    gathers = [Call("gather", tuple(size * count for count in counts)) for size in sizes]
    return [*gathers, Call("broadcast", (tree.num_bytes(like),) * ranks)]
