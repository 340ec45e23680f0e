"""Whether an algorithm says of `Offered` and `Chosen` messages what a run needs."""

import torch

from pflmpi import tree
from pflmpi.algorithms.base import Algorithm, initial_client
from pflmpi.errors import ConfigError
from pflmpi.learning.task import HOST, Task
from pflmpi.messages.kinds import Chosen, Offered, tensor, with_rows
from pflmpi.tree import Tree


def check_offered(algorithm: Algorithm, task: Task) -> None:
    """Raise `ConfigError` for `Offered` and `Chosen` messages that do not fit each other or the clients' state."""
    kind, up = type(algorithm).__name__, algorithm.uplink(task)
    offered = {name: one for name, one in up.items() if isinstance(one, Offered)}
    state = dict(tree.leaves(initial_client(algorithm, task.replace(device=HOST), 0))) if offered else {}
    for name, sent in offered.items():
        for path, leaf in tree.leaves({name: sent.like}):
            if path not in state or tree.differences({path: leaf}, {path: state[path]}):
                raise ConfigError(
                    f"{kind}.uplink: {name!r} is `Offered`, so that it is part of the client's state, and "
                    f"`init_client` has no {path} of shape {list(leaf.shape)} and type {str(leaf.dtype)[6:]}"
                )
    for name, one in algorithm.downlink(task).items():
        if not isinstance(one, Chosen):
            continue
        if one.of not in offered:
            raise ConfigError(
                f"{kind}.downlink: {name!r} is chosen of {one.of!r}, which is no `Offered` message of `uplink`; known: "
                f"{', '.join(offered) or 'none'}"
            )
        clients = one.like.get("clients")
        count = clients.numel() if isinstance(clients, torch.Tensor) else 0
        needed: Tree = {"clients": tensor(count, dtype=torch.int64), one.of: with_rows(offered[one.of].like, count)}
        if wrong := tree.differences(one.like, needed):
            raise ConfigError(
                f"{kind}.downlink: {name!r} is not the ids of M clients and what these offer: {'; '.join(wrong)}"
            )
        if name in algorithm.predicts_with:
            raise ConfigError(
                f"{kind}.predicts_with names {name!r}, a `Chosen` message, which is for local training alone; keep "
                "what a client predicts with in its state"
            )
