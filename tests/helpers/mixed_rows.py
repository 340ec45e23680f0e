"""What the server sees of `Compared` messages, and what it answers, for one rank that has all participants."""

import numpy as np

from pflmpi import tree
from pflmpi.algorithms.base import Algorithm, Round
from pflmpi.learning.task import Task
from pflmpi.messages import mixing
from pflmpi.messages.declared import Declared
from pflmpi.messages.kinds import Messages
from pflmpi.messages.leaf_owners import LeafOwners
from pflmpi.messages.linear_algebra import inner_products
from pflmpi.transports.inprocess import InProcessTransport
from pflmpi.tree import Tree

_ALONE = InProcessTransport()


def products(rows: Tree, from_first: bool = False) -> Tree:
    """The inner products [P, P] of each leaf."""
    return tree.map(lambda leaf: inner_products(leaf, from_first), rows)


def answers(algorithm: Algorithm, task: Task, up: Messages, round: Round) -> Messages:
    """The answers [P, ...] to the participants of a round, who have sent rows [P, ...]."""
    owners, received, found = _compared(algorithm, task, {}, up, round)
    return mixing.mix(_ALONE, owners, received, algorithm.mixing_weights(task, found, round))


def server_step(algorithm: Algorithm, task: Task, server: Tree, up: Messages, round: Round) -> Tree:
    """The server's state after a round with centres, of participants who have sent rows [P, ...]."""
    owners, received, found = _compared(algorithm, task, server, up, round)
    weights = algorithm.mixing_weights(task, found, round)
    mixing.check_weights(owners, weights)
    return algorithm.server_update(
        task, server, {**found, **mixing.sum_centres(_ALONE, owners, received, weights)}, round
    )


def _compared(
    algorithm: Algorithm, task: Task, server: Tree, up: Messages, round: Round
) -> tuple[LeafOwners, mixing.Received, Messages]:
    nothing = np.zeros((task.num_clients, task.num_classes), bool)
    declared = Declared(dict(algorithm.uplink(task)), dict(algorithm.downlink(task)), nothing, nothing.sum(1))
    owners = LeafOwners.of(declared, [[round.participants]])
    received, found = mixing.compare(_ALONE, owners, [(round.participants, up)], server)
    return owners, received, {**up, **found}
