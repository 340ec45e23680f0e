"""What clients keep before the first round; where it is the same for all, it is made once."""

from typing import Any

from pflmpi import tree
from pflmpi.algorithms.base import Algorithm
from pflmpi.learning.task import HOST, Task
from pflmpi.runtime.contract import calling
from pflmpi.runtime.exchange.mixed import ANSWERED
from pflmpi.runtime.state.rows import Rows
from pflmpi.tree import Tree


def fill(rows: Rows, algorithm: Algorithm, task: Task) -> None:
    """Give the clients of a cohort what they keep before the first round."""
    if not len(rows.clients):
        return
    host = task.replace(device=HOST)
    with calling(algorithm, "init_client", 0):
        if (same := of_anyone(algorithm, host)) is not None:
            _begin(rows, rows.clients, same)
            return
        for position, client in enumerate(rows.clients.tolist()):
            _begin(rows, rows.clients[position : position + 1], of_one(algorithm, host, client))


def of_one(algorithm: Algorithm, task: Task, client: int) -> Tree:
    """What a client keeps before the first round, with what it has of `Mixed` messages."""
    state, mixed = algorithm.init_client(task, client), algorithm.init_received(task, client)
    return {**state, ANSWERED: {**mixed}} if mixed else state


def of_anyone(algorithm: Algorithm, task: Task) -> Tree | None:
    """What every client of a cohort keeps before the first round; None where it may depend on the client."""
    someone = _Someone()
    try:
        state = of_one(algorithm, task, someone)  # type: ignore[arg-type]
    except Exception:  # not every number may be anyone's; with a real one an error has its own message
        return None
    return None if someone.asked else state


def _begin(rows: Rows, clients: Any, state: Tree) -> None:
    for path, leaf in tree.leaves(state):
        rows.begin(clients, path, leaf.unsqueeze(0))


class _Someone:
    """Stands for any client: a number that notes whether anyone looks at it, and is 0 then."""

    asked = False


def _noted(name: str) -> Any:
    def method(self: _Someone, *arguments: Any) -> Any:
        self.asked = True
        return getattr(0, name)(*arguments)

    return method


_ASKING = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__repr__", "__str__", "__format__"}
for _name in {*dir(int)} - ({*dir(object)} - _ASKING):
    if callable(getattr(int, _name)):
        setattr(_Someone, _name, _noted(_name))
