"""Whether an algorithm says of `Compared`, `Centres` and `Mixed` messages what a run needs."""

from pflmpi import tree
from pflmpi.algorithms.base import Algorithm, initial_received
from pflmpi.errors import ConfigError
from pflmpi.learning.task import HOST, Task
from pflmpi.messages.kinds import Centres, Compared, Mixed, with_rows
from pflmpi.tree import Tree

ANSWERED = "answered"  # where a client's last `Mixed` messages are kept, beside the algorithm's state


def mixed_templates(algorithm: Algorithm, task: Task) -> Tree:
    """The `Mixed` messages of one client, by name."""
    return {name: kind.like for name, kind in algorithm.downlink(task).items() if isinstance(kind, Mixed)}


def check_mixed(algorithm: Algorithm, task: Task) -> None:
    """Raise `ConfigError` for `Compared`, `Centres` and `Mixed` messages that do not fit each other."""
    kind, up, down = type(algorithm).__name__, algorithm.uplink(task), algorithm.downlink(task)
    compared = {name: one for name, one in up.items() if isinstance(one, Compared)}
    for name, sent in compared.items():
        if not all(leaf.is_floating_point() for _, leaf in tree.leaves(sent.like)):
            raise ConfigError(f"{kind}.uplink: {name!r} is `Compared`, so that all its leaves must be floats")
    made = {name: one for name, one in {**up, **down}.items() if isinstance(one, Mixed | Centres)}
    for name, one in made.items():
        where = f"{kind}.downlink" if isinstance(one, Mixed) else f"{kind}.uplink"
        if one.of not in compared:
            raise ConfigError(
                f"{where}: {name!r} is made of {one.of!r}, which is no `Compared` message of `uplink`; known: "
                f"{', '.join(compared) or 'none'}"
            )
        if wrong := tree.differences(one.like, compared[one.of].like):
            raise ConfigError(
                f"{where}: {name!r} differs from {one.of!r}, of which it is made: {'; '.join(wrong)}; declare the same "
                "leaves"
            )
        if isinstance(one, Centres):
            _check_centres(algorithm, task, name, one)
        elif name in algorithm.predicts_with:
            raise ConfigError(
                f"{kind}.predicts_with names {name!r}, a `Mixed` message, which is for the next local training alone; "
                "keep what a client predicts with in its state"
            )
    first = initial_received(algorithm, task.replace(device=HOST), 0)
    if wrong := tree.differences(dict(first), mixed_templates(algorithm, task)):
        raise ConfigError(
            f"{kind}.init_received gives other messages than the `Mixed` ones of `downlink`: {'; '.join(wrong)}"
        )


def _check_centres(algorithm: Algorithm, task: Task, name: str, one: Centres) -> None:
    kind, up = type(algorithm).__name__, algorithm.uplink(task)
    others = [other for other, centres in up.items() if isinstance(centres, Centres) and centres.of == one.of]
    if len(others) > 1:
        raise ConfigError(
            f"{kind}.uplink: {' and '.join(map(repr, others))} are centres of one message, {one.of!r}; declare one"
        )
    server = algorithm.init_server(task.replace(device=HOST))
    found: Tree = {name: server[name]} if name in server else {}
    expected: Tree = {name: with_rows(one.like, one.count)}
    if wrong := tree.differences(found, expected):
        raise ConfigError(
            f"{kind}.uplink: {name!r} are `Centres`, so that they are part of the server's state, and `init_server` "
            f"has others: {'; '.join(wrong)}"
        )
