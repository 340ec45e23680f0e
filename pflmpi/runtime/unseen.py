"""Testing clients that are kept out of training: each joins as a newcomer, and its state is not kept."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pflmpi import tree
from pflmpi.algorithms.base import Algorithm, Newcomer, initial_client
from pflmpi.learning.task import HOST
from pflmpi.messages.declared import Declared
from pflmpi.messages.deliver import deliver, delivery_traffic
from pflmpi.messages.downlink import Homes, KeptRows, Reply, down_calls, send_down
from pflmpi.messages.groups import ClientGroup, clients_of_all
from pflmpi.messages.kinds import Messages, Shared
from pflmpi.messages.packing import pack, unpack
from pflmpi.messages.traffic import Traffic
from pflmpi.runtime.client_state import Population
from pflmpi.runtime.contract import ANSWERED, answer_templates, calling
from pflmpi.runtime.counts import Counts
from pflmpi.runtime.evaluation import collect_counts, evaluate_shared_model, is_model_shared
from pflmpi.runtime.executors.base import Executor
from pflmpi.runtime.placement import Placement, compute_relative_flops, count_round_steps, cut_groups
from pflmpi.transports.base import Transport
from pflmpi.tree import Tree


@dataclass(frozen=True)
class Unseen:
    """Setup of the tests of unseen clients; the same on every rank."""

    executor: Executor  # its federation has the trained clients, then the unseen ones
    declared: Declared  # messages down that differ between clients; the shared ones come with the round's reply
    groups: list[list[ClientGroup]]  # by rank
    updates: int  # local updates of each; 0 if newcomers do not train
    home: np.ndarray | None  # [N] the rank of each trained client; None if they have no state

    @property
    def algorithm(self) -> Algorithm:
        return self.executor.algorithm

    @cached_property
    def answers(self) -> Tree:
        """Templates of the messages that trained clients keep."""
        return answer_templates(self.algorithm, self.executor.tasks[0].replace(device=HOST))

    @cached_property
    def clients(self) -> np.ndarray:
        """[U] ascending ids."""
        return clients_of_all(self.groups)

    @property
    def calls(self) -> list[Traffic]:
        """The collective calls of `mean_answers` and `evaluate_unseen`."""
        calls = down_calls(self.declared, self.groups, self.home)
        if not self.answers:
            return calls
        rows = (
            delivery_traffic(*self._rows_on_server, {"leaf": leaf}, down=False) for _, leaf in tree.leaves(self.answers)
        )
        return [*rows, Traffic.broadcast(tree.num_bytes(self.answers), len(self.groups)), *calls]

    @property
    def _rows_on_server(self) -> tuple[list[np.ndarray], np.ndarray]:
        """Receivers and homes for a `deliver` of all trained clients' rows to rank 0."""
        assert self.home is not None, "clients that keep messages have a home"
        return [np.arange(len(self.home)), *[np.empty(0, np.int64)] * (len(self.groups) - 1)], self.home


def unseen_setup(
    executor: Executor, down: Mapping[str, Shared], placement: Placement, lanes: int, rule: Newcomer, updates: int
) -> Unseen:
    """Places the unseen clients on ranks, and declares their messages.

    Args:
        executor: its federation has the trained clients, then the unseen ones.
        down: the algorithm's messages down.
        placement: of the trained clients.
        updates: local updates of each, if newcomers train.
    """
    federation, training = executor.federation, executor.tasks[0].training
    clients = np.arange(len(placement.work), federation.num_clients)
    steps = count_round_steps(training, federation.num_train)
    samples = 3.0 * steps * training.batch_size * (updates if rule.trains else 0) + federation.num_test
    work = samples * compute_relative_flops(executor.tasks, federation.dataset.images[:1])[executor.cohort]
    groups = tuple(clients[group] for group in cut_groups(executor.cohort[clients], steps[clients], lanes))
    unseen = Placement(placement.ranks, groups, placement.max_clients, None, placement.computing_ranks, work, work)
    own = {name: kind for name, kind in down.items() if type(kind) is not Shared}
    declared = Declared({}, own, federation.class_counts > 0, federation.num_train)
    return Unseen(executor, declared, unseen.assign(clients), updates if rule.trains else 0, placement.home)


def mean_answers(unseen: Unseen, transport: Transport, population: Population) -> Messages:
    """Returns the mean of each kept message over all trained clients, which newcomers receive instead.

    Rank 0 has one leaf of all clients in memory at a time.
    """
    if not unseen.answers:
        return {}
    means = {}
    with transport.counting():
        for path, leaf in tree.leaves(unseen.answers):

            def rows(clients: np.ndarray, path: str = path) -> Tree:
                return {"leaf": population.leaf(f"{ANSWERED}/{path}", clients)}

            received = deliver(transport, *unseen._rows_on_server, rows, {"leaf": leaf}, down=False)
            # Other ranks receive no rows; their NaN is overwritten by the broadcast below.
            means[path] = tree.leaf(received, "leaf").double().mean(0).to(leaf.dtype)
        buffer = pack(tree.unflatten(means))
        transport.broadcast(buffer)
    return unpack(buffer, unseen.answers)  # type: ignore[return-value]


def evaluate_unseen(
    unseen: Unseen, transport: Transport, server: Tree, shared: Messages, kept: KeptRows, round: int
) -> Counts:
    """Tests the unseen clients of this rank; the counts are in ascending order of ids.

    Args:
        server: the server's state after the round; rank 0 only.
        shared: the messages that are the same for all: of the round's reply, and those of `mean_answers`.
        kept: rows of the trained clients that live here; see `Homes`.
    """
    reply = receive_messages(unseen, transport, server, shared, kept, round)
    groups, executor = unseen.groups[transport.rank], unseen.executor
    if is_model_shared(executor, unseen.home):
        return evaluate_shared_model(executor, reply, groups, round)

    def begin(group: ClientGroup) -> Callable[[], Counts]:
        states = join_newcomers(unseen, group, reply.for_clients(group), round)
        return executor.evaluate(group, states, reply.for_clients(group, unseen.algorithm.predicts_with), round)

    return collect_counts(executor, groups, map(begin, groups))


def receive_messages(
    unseen: Unseen, transport: Transport, server: Tree, shared: Messages, kept: KeptRows, round: int
) -> Reply:
    """Returns the messages that this rank's unseen clients receive; the arguments are those of `evaluate_unseen`."""
    if not unseen.declared.down:
        return Reply(shared)
    published = None
    if transport.rank == 0:
        with calling(unseen.algorithm, "publish_to_newcomers", round, reads={"server": server}):
            task = unseen.executor.tasks[0].replace(device=HOST)
            messages = unseen.algorithm.publish_to_newcomers(task, server, unseen.clients)
        published = {name: value for name, value in messages.items() if name in unseen.declared.down}
    homes = Homes(unseen.home, kept)
    return replace(send_down(transport, unseen.declared, published, unseen.groups, homes=homes), shared=shared)


def join_newcomers(unseen: Unseen, group: ClientGroup, down: Messages, round: int) -> Tree:
    """Returns the states [m, ...] of newcomers after their local updates with the messages [m, ...] of a round."""
    task = unseen.executor.task(group).replace(device=HOST)
    with calling(unseen.algorithm, "init_client", round):
        states = tree.stack([initial_client(unseen.algorithm, task, int(client)) for client in group])
    return unseen.executor.join(group, states, down, round + 1, unseen.updates)
