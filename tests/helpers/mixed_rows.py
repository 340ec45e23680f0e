"""What the server sees of `Compared` messages, and what it answers, for one rank that has all participants."""

import numpy as np

from pflmpi import tree
from pflmpi.algorithms.base import Algorithm, Round
from pflmpi.learning.task import Task
from pflmpi.messages import mixing
from pflmpi.messages.declared import Declared
from pflmpi.messages.kinds import Messages
from pflmpi.messages.leaf_owners import LeafOwners
from pflmpi.transports.inprocess import InProcessTransport
from pflmpi.tree import Tree


def products(rows: Tree, from_first: bool = False) -> Tree:
    """The inner products [P, P] of each leaf."""
    return tree.map(lambda leaf: mixing.inner_products(leaf, from_first), rows)


def answers(algorithm: Algorithm, task: Task, up: Messages, round: Round) -> Messages:
    """The answers [P, ...] to the participants of a round, who have sent rows [P, ...]."""
    nothing = np.zeros((task.num_clients, task.num_classes), bool)
    declared = Declared(dict(algorithm.uplink(task)), dict(algorithm.downlink(task)), nothing, nothing.sum(1))
    owners, alone = LeafOwners.of(declared, [[round.participants]]), InProcessTransport()
    received, found = mixing.compare(alone, owners, [(round.participants, up)])
    return mixing.mix(alone, owners, received, algorithm.mixing_weights(task, found, round))
