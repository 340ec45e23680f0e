"""What clients keep before the first round; where it is the same for all, it is made once."""

from typing import Any

from pflmpi import tree
from pflmpi.algorithms.base import Algorithm, depends_on_client, initial_client, initial_received
from pflmpi.learning.task import HOST, Task
from pflmpi.runtime.contract import ANSWERED, calling
from pflmpi.runtime.state.rows import Rows
from pflmpi.tree import Tree


def fill(rows: Rows, algorithm: Algorithm, task: Task) -> None:
    """Give the clients of a cohort what they keep before the first round."""
    if not len(rows.clients):
        return
    host = task.replace(device=HOST)
    each = depends_on_client(algorithm, task)
    with calling(algorithm, "init_client", 0):
        for position in range(len(rows.clients) if each else 1):
            client = int(rows.clients[position])
            _begin(rows, rows.clients[position : position + 1] if each else rows.clients, _of(algorithm, host, client))


def _of(algorithm: Algorithm, task: Task, client: int) -> Tree:
    """What a client keeps before the first round, with its first kept messages."""
    state, answers = initial_client(algorithm, task, client), initial_received(algorithm, task, client)
    return {**state, ANSWERED: {**answers}} if answers else state


def _begin(rows: Rows, clients: Any, state: Tree) -> None:
    for path, leaf in tree.leaves(state):
        rows.begin(clients, path, leaf.unsqueeze(0))
