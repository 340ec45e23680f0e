"""Whether an algorithm says of `Mixed` messages what a run needs."""

from pflmpi import tree
from pflmpi.algorithms.base import Algorithm
from pflmpi.errors import ConfigError
from pflmpi.learning.task import HOST, Task
from pflmpi.messages.kinds import Compared, Mixed
from pflmpi.tree import Tree

ANSWERED = "answered"  # where a client's last `Mixed` messages are kept, beside the algorithm's state


def mixed_templates(algorithm: Algorithm, task: Task) -> Tree:
    """The `Mixed` messages of one client, by name."""
    return {name: kind.like for name, kind in algorithm.downlink(task).items() if isinstance(kind, Mixed)}


def check_mixed(algorithm: Algorithm, task: Task) -> None:
    """Raise `ConfigError` for `Compared` and `Mixed` messages that do not fit each other."""
    kind, up = type(algorithm).__name__, algorithm.uplink(task)
    compared = {name: one for name, one in up.items() if isinstance(one, Compared)}
    for name, sent in compared.items():
        if not all(leaf.is_floating_point() for _, leaf in tree.leaves(sent.like)):
            raise ConfigError(f"{kind}.uplink: {name!r} is `Compared`, so that all its leaves must be floats")
    for name, one in algorithm.downlink(task).items():
        if not isinstance(one, Mixed):
            continue
        if one.of not in compared:
            raise ConfigError(
                f"{kind}.downlink: {name!r} is mixed of {one.of!r}, which is no `Compared` message of `uplink`; known: "
                f"{', '.join(compared) or 'none'}"
            )
        if wrong := tree.differences(one.like, compared[one.of].like):
            raise ConfigError(
                f"{kind}.downlink: {name!r} differs from {one.of!r}, of which it is mixed: {'; '.join(wrong)}; declare "
                "the same leaves"
            )
        if name in algorithm.predicts_with:
            raise ConfigError(
                f"{kind}.predicts_with names {name!r}, a `Mixed` message, which is for the next local training alone; "
                "keep what a client predicts with in its state"
            )
    first = algorithm.init_received(task.replace(device=HOST), 0)
    if wrong := tree.differences(dict(first), mixed_templates(algorithm, task)):
        raise ConfigError(
            f"{kind}.init_received gives other messages than the `Mixed` ones of `downlink`: {'; '.join(wrong)}"
        )
