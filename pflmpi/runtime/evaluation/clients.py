"""Testing the personal models of all clients, where they live."""

from pflmpi.messages.downlink import Reply
from pflmpi.messages.groups import ClientGroup
from pflmpi.runtime.client_state import Population
from pflmpi.runtime.evaluation.measures import Counts, in_client_order
from pflmpi.runtime.executors.base import Executor


def evaluate(executor: Executor, population: Population, reply: Reply, groups: list[ClientGroup], round: int) -> Counts:
    """What the clients of the given groups get right, in the order of `clients_of(groups)`."""
    found = []
    for group in groups:
        # Only what prediction reads: a client that was absent has not received anything else.
        received = population.received(group, reply, executor.algorithm.predicts_with)
        found.append(executor.evaluate(group, population.get(group), received, round))
    return in_client_order(groups, found, executor.federation.dataset.num_classes)
