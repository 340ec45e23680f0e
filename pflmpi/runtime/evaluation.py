"""Testing the personal models of clients, where they live; those that predict with one and the same model, together.

What a sample scores may depend on the size of its batch, which decides the kernels, and on its place in it, by how its
row is aligned, but not on the samples beside it (`tests/runtime/test_evaluation.py`). So where clients share a model,
batches hold samples of all of them and are filled up, each sample has the place that it has where one rank tests all
clients, and who is tested on which rank decides no bit.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import starmap

import numpy as np
import torch

from pflmpi import tree
from pflmpi.messages.downlink import Reply
from pflmpi.messages.groups import ClientGroup, clients_of
from pflmpi.messages.kinds import Messages, Updates, as_messages
from pflmpi.runtime.client_state import Population
from pflmpi.runtime.contract import calling
from pflmpi.runtime.counts import Counts, count_results, in_client_order, predict_batches
from pflmpi.runtime.executors.base import Executor
from pflmpi.runtime.executors.batches import ClientBatches, cumcount
from pflmpi.runtime.executors.transfers import download_all, run_pipelined, upload


def evaluate(executor: Executor, population: Population, reply: Reply, groups: list[ClientGroup], round: int) -> Counts:
    """Test the clients of some groups; in the order of `clients_of(groups)`."""

    def begin(group: ClientGroup) -> Callable[[], Counts]:
        # Only what prediction reads: a client that was absent has not received anything else.
        received = population.received(group, reply, executor.algorithm.predicts_with)
        return executor.evaluate(group, population.get(group), received, round)

    return collect_counts(executor, groups, map(begin, groups))


def evaluate_shared_model(executor: Executor, reply: Reply, groups: Sequence[ClientGroup], round: int) -> Counts:
    """As `evaluate`, of clients that keep nothing and have all received the same: they predict with one model."""
    received = {name: tree.clone(reply.shared[name]) for name in executor.algorithm.predicts_with}
    groups = list(regroup(executor, groups))
    return collect_counts(executor, groups, (evaluate_together(executor, group, received, round) for group in groups))


def evaluate_trained(executor: Executor, population: Population, reply: Reply, ups: Updates, round: int) -> Counts:
    """Test participants with the models that local training leaves; in ascending order of their ids.

    Args:
        reply: what they have trained with.
        ups: what they send.
    """

    def begin(group: ClientGroup, up: Messages) -> Callable[[], Counts]:
        down = reply.for_clients(group, executor.algorithm.predicts_with)
        read = executor.algorithm.after_training(executor.task(group), down, up)
        return executor.evaluate(group, population.get(group), read, round)

    return collect_counts(executor, [group for group, _ in ups], starmap(begin, ups))


def collect_counts(executor: Executor, groups: Sequence[ClientGroup], begun: Iterable[Callable[[], Counts]]) -> Counts:
    """Run the tests of some groups, which begin as the iterator goes on; in ascending order of the ids."""
    counts = list(run_pipelined(begun, executor.ahead))
    return in_client_order(groups, counts, executor.untested([]))


_MIN_BATCH = 32  # samples of a batch; more where clients have more on average
_MAX_SAMPLES = 2**15  # samples whose scores are on the host at a time


def is_model_shared(executor: Executor, home: np.ndarray | None) -> bool:
    """Whether all clients predict with one model: they keep nothing, receive the same, and do not adapt it.

    Args:
        home: of the placement; None where clients keep nothing and receive the same.
    """
    return home is None and not executor.adapts


def regroup(executor: Executor, groups: Sequence[ClientGroup]) -> Iterator[ClientGroup]:
    """The clients of some groups, regrouped in ascending order by cohort and by at most `_MAX_SAMPLES` test samples."""
    clients = clients_of(groups)
    for cohort in np.unique(executor.cohort[clients]):
        members = clients[executor.cohort[clients] == cohort]
        part = np.cumsum(executor.federation.num_test[members]) // _MAX_SAMPLES
        yield from np.split(members, np.flatnonzero(np.diff(part)) + 1)


def evaluate_together(executor: Executor, clients: np.ndarray, received: Messages, round: int) -> Callable[[], Counts]:
    """Begin to test clients of one cohort that keep nothing; see `Executor.evaluate`.

    Args:
        clients: [m] ids.
        received: messages of any of them, without a leading axis.
    """
    task, width = executor.task(clients), _choose_batch_size(executor)
    tests = [executor.federation.test[client] for client in clients]
    pool = executor.pool.on_device(tests)
    samples = pool.places(np.concatenate(tests))
    at = _place_samples(executor.federation.num_test, clients, width)
    filled = np.resize(samples[:1], -(-(at.max(initial=-1) + 1) // width) * width)
    filled[at] = samples
    uploaded = upload({"down": {**received}, "tests": torch.from_numpy(filled)}, executor.device)
    batches = ClientBatches(task, pool, tree.leaf(uploaded, "tests"), [width] * (len(filled) // width))
    down = tree.part(uploaded, "down")
    first = executor.first_test
    with calling(executor.algorithm, "predict", round, clients.tolist(), reads={"down": down}, first=first):
        scores = predict_batches(executor.algorithm, task, {}, as_messages(down), batches)
    done = download_all(scores, executor.device)
    return lambda: count_results(
        executor.federation,
        clients,
        torch.cat([torch.empty(0, *task.score_shape), *done()])[at],
        executor.measures,
    )


def _place_samples(sizes: np.ndarray, clients: np.ndarray, width: int) -> np.ndarray:
    """Where the samples of some clients, one after another, are in batches of a width that are laid end to end.

    Args:
        sizes: [N] samples of each client.
        clients: [m] ids.

    >>> _place_samples(np.array([3, 2, 4]), np.array([1, 2]), 4)  # the clients' samples are 3, 4 and 5, 6, 7, 8 of all
    array([3, 0, 1, 2, 7, 4])
    """
    counts, starts = sizes[clients], (np.cumsum(sizes) - sizes)[clients]
    of_all = np.repeat(starts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
    return np.asarray(cumcount(of_all % width) * width + of_all % width)


def _choose_batch_size(executor: Executor) -> int:
    """Samples of a batch: on a CPU as many as clients have on average, so that a rank with one computes few in vain.

    A GPU takes as long for one sample as for many.
    """
    if executor.device.type != "cpu":
        return executor.eval_batch
    average = int(np.ceil(executor.federation.num_test.mean()))
    return min(executor.eval_batch, max(_MIN_BATCH, average))
