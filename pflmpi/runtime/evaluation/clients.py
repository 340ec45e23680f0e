"""Testing the personal models of all clients, where they live."""

from collections.abc import Callable, Iterable, Sequence
from itertools import starmap

from pflmpi import tree
from pflmpi.messages.downlink import Reply
from pflmpi.messages.groups import ClientGroup
from pflmpi.messages.kinds import Messages, Updates
from pflmpi.runtime.client_state import Population
from pflmpi.runtime.evaluation.measures import Counts, in_client_order
from pflmpi.runtime.executors import shared_model
from pflmpi.runtime.executors.base import Executor
from pflmpi.runtime.executors.transfers import pipelined


def evaluate(executor: Executor, population: Population, reply: Reply, groups: list[ClientGroup], round: int) -> Counts:
    """What the clients of the given groups get right, in the order of `clients_of(groups)`."""

    def begin(group: ClientGroup) -> Callable[[], Counts]:
        # Only what prediction reads: a client that was absent has not received anything else.
        received = population.received(group, reply, executor.algorithm.predicts_with)
        return executor.evaluate(group, population.get(group), received, round)

    return finished(executor, groups, map(begin, groups))


def evaluate_shared_model(executor: Executor, reply: Reply, groups: Sequence[ClientGroup], round: int) -> Counts:
    """As `evaluate`, of clients that keep nothing and have all received the same: they predict with one model."""
    received = {name: tree.clone(reply.shared[name]) for name in executor.algorithm.predicts_with}
    regrouped = list(shared_model.regrouped(executor, groups))
    begun = (shared_model.evaluate(executor, clients, received, round) for clients in regrouped)
    return finished(executor, regrouped, begun)


def evaluate_trained(
    executor: Executor,
    population: Population,
    reply: Reply,
    ups: Updates,
    round: int,
) -> Counts:
    """What participants get right with the models that local training leaves, in ascending order of their ids.

    Args:
        reply: what they have trained with.
        ups: what they send.
    """

    def begin(group: ClientGroup, up: Messages) -> Callable[[], Counts]:
        down = reply.for_clients(group, executor.algorithm.predicts_with)
        read = executor.algorithm.after_training(executor.task(group), down, up)
        return executor.evaluate(group, population.get(group), read, round)

    return finished(executor, [group for group, _ in ups], starmap(begin, ups))


def finished(executor: Executor, groups: Sequence[ClientGroup], begun: Iterable[Callable[[], Counts]]) -> Counts:
    """The counts of some groups in ascending order of the ids, of tests that begin as the iterator goes on."""
    found = list(pipelined(begun, executor.ahead))
    return in_client_order(groups, found, executor.federation.dataset.num_classes)
