"""Testing the personal models of clients; clients that share one model are tested together.

The bits of a sample's scores may depend on the size of its batch, which selects kernels, and on its position, which
aligns its row, but not on the other samples (`tests/runtime/test_evaluation.py`). So batches of a shared model are
filled up to one size, and each sample has the position that it has if one rank tests all clients: results do not depend
on which rank tests whom.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import starmap

import numpy as np
import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.messages.downlink import Reply
from pflmpi.messages.groups import ClientGroup, clients_of
from pflmpi.messages.kinds import Messages, Updates, as_messages
from pflmpi.runtime.client_state import Population
from pflmpi.runtime.contract import calling
from pflmpi.runtime.counts import Counts, count_results, predict_batches, sort_by_client
from pflmpi.runtime.executors.base import Executor
from pflmpi.runtime.executors.batches import ClientBatches, cumcount
from pflmpi.runtime.executors.transfers import download_all, run_pipelined, upload
from pflmpi.tree import Tree

_MIN_BATCH = 32  # samples of a batch; more if clients have more on average
_MAX_SAMPLES = 2**15  # samples whose scores are on the host at a time


def evaluate(executor: Executor, population: Population, reply: Reply, groups: list[ClientGroup], round: int) -> Counts:
    """Test clients; the counts are in the order of `clients_of(groups)`."""

    def begin(group: ClientGroup) -> Callable[[], Counts]:
        # Only the messages that prediction reads, because absent clients have received no others.
        received = population.received(group, reply, executor.algorithm.predicts_with)
        return executor.evaluate(group, population.get(group), received, round)

    return collect_counts(executor, groups, map(begin, groups))


def evaluate_shared_model(executor: Executor, reply: Reply, groups: Sequence[ClientGroup], round: int) -> Counts:
    """As `evaluate`, for clients without state that all received the same messages, and so predict with one model."""
    received = {name: tree.clone(reply.shared[name]) for name in executor.algorithm.predicts_with}
    groups = list(regroup(executor, groups))
    return collect_counts(executor, groups, (evaluate_together(executor, group, received, round) for group in groups))


def evaluate_trained(executor: Executor, population: Population, reply: Reply, ups: Updates, round: int) -> Counts:
    """Test participants with their models after local training; the counts are in ascending order of ids.

    Args:
        reply: the messages that they trained with.
        ups: the messages that they send.
    """

    def begin(group: ClientGroup, up: Messages) -> Callable[[], Counts]:
        down = reply.for_clients(group, executor.algorithm.predicts_with)
        reads: dict[str, Tensor | Tree] = {"down": {**down}, "up": {**up}}
        first, ids = executor.first_test, group.tolist()
        with calling(executor.algorithm, "after_training", round, ids, reads=reads, first=first):
            received = executor.algorithm.after_training(executor.task(group), down, up)
        return executor.evaluate(group, population.get(group), received, round)

    return collect_counts(executor, [group for group, _ in ups], starmap(begin, ups))


def collect_counts(executor: Executor, groups: Sequence[ClientGroup], tests: Iterable[Callable[[], Counts]]) -> Counts:
    """Run one test per group, which starts as the iterator advances; the counts are in ascending order of ids."""
    counts = list(run_pipelined(tests, executor.ahead))
    return sort_by_client(groups, counts, executor.untested([]))


def is_model_shared(executor: Executor, home: np.ndarray | None) -> bool:
    """Whether all clients predict with one model: they have no state, receive the same, and do not adapt it.

    Args:
        home: `Placement.home`, which is None if clients have no state and receive the same.
    """
    return home is None and not executor.adapts


def regroup(executor: Executor, groups: Sequence[ClientGroup]) -> Iterator[ClientGroup]:
    """Yields the clients in ascending order, by cohort and with about `_MAX_SAMPLES` test samples per group."""
    clients = clients_of(groups)
    for cohort in np.unique(executor.cohort[clients]):
        members = clients[executor.cohort[clients] == cohort]
        part = np.cumsum(executor.federation.num_test[members]) // _MAX_SAMPLES
        yield from np.split(members, np.flatnonzero(np.diff(part)) + 1)


def evaluate_together(executor: Executor, clients: np.ndarray, received: Messages, round: int) -> Callable[[], Counts]:
    """Start testing clients of one cohort without state; see `Executor.evaluate`.

    Args:
        clients: [m] ids.
        received: the messages that all of them received, without a leading axis.
    """
    task, width = executor.task(clients), _choose_batch_size(executor)
    tests = [executor.federation.test[client] for client in clients]
    pool = executor.pool.on_device(tests)
    samples = pool.places(np.concatenate(tests))
    positions = _place_samples(executor.federation.num_test, clients, width)
    order = np.resize(samples[:1], -(-(positions.max(initial=-1) + 1) // width) * width)  # gaps repeat one sample
    order[positions] = samples
    uploaded = upload({"down": {**received}, "tests": torch.from_numpy(order)}, executor.device)
    batches = ClientBatches(task, pool, tree.leaf(uploaded, "tests"), [width] * (len(order) // width))
    down = tree.part(uploaded, "down")
    first = executor.first_test
    with calling(executor.algorithm, "predict", round, clients.tolist(), reads={"down": down}, first=first):
        scores = predict_batches(executor.algorithm, task, {}, as_messages(down), batches)
    wait = download_all(scores, executor.device)
    no_scores = torch.empty(0, *task.score_shape)
    return lambda: count_results(
        executor.federation, clients, torch.cat([no_scores, *wait()])[positions], executor.measures
    )


def _place_samples(sizes: np.ndarray, clients: np.ndarray, width: int) -> np.ndarray:
    """Returns the positions of the clients' samples in concatenated batches of `width`.

    The position within a batch is that which the sample has in batches of all N clients.

    Args:
        sizes: [N] samples of each client.
        clients: [m] ids.

    >>> _place_samples(np.array([3, 2, 4]), np.array([1, 2]), 4)  # samples 3, 4 and 5, 6, 7, 8 of all
    array([3, 0, 1, 2, 7, 4])
    """
    counts, starts = sizes[clients], (np.cumsum(sizes) - sizes)[clients]
    numbers = np.repeat(starts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())  # among all samples
    return np.asarray(cumcount(numbers % width) * width + numbers % width)


def _choose_batch_size(executor: Executor) -> int:
    """Samples of a batch: on a CPU as many as an average client has, so that a rank with one client pads little.

    A GPU takes as long for one sample as for many.
    """
    if executor.device.type != "cpu":
        return executor.eval_batch
    average = int(np.ceil(executor.federation.num_test.mean()))
    return min(executor.eval_batch, max(_MIN_BATCH, average))
