"""Bytes of the data, of the state between rounds, and of checkpoints on disk."""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

import numpy as np

from pflmpi import tree
from pflmpi.algorithms.base import depends_on_client
from pflmpi.config.load import Config
from pflmpi.data.federation import Federation
from pflmpi.experiment.build import Experiment
from pflmpi.learning.local_training import OPTIMIZER
from pflmpi.learning.task import HOST
from pflmpi.messages.uplink_transforms import RESIDUAL
from pflmpi.runtime.client_state import stored_messages
from pflmpi.runtime.contract import RECEIVED
from pflmpi.runtime.placement import Placement
from pflmpi.runtime.round_schedule import RoundSchedule, schedule
from pflmpi.runtime.setup import Setup
from pflmpi.store.shard import ID_BYTES

_FEW_CLIENTS = 3  # the server's state is made for so many clients, one and two more, to see how it grows


@dataclass(frozen=True)
class StateSizes:
    """Bytes of the state between rounds."""

    client: np.ndarray  # [N] state of each client, with the stored reply that it is tested with, if any
    first: np.ndarray  # [N] the part of it that differs between clients before they train
    server: int  # state of the server
    received: int  # messages that a checkpoint stores besides, because personal models are made of them

    def hosted(self, placement: Placement) -> np.ndarray:
        """[R] bytes of the clients on each rank, once all have trained."""
        return np.array([int(self.client[placement.hosted(rank)].sum()) for rank in range(placement.ranks)], np.int64)

    def at_the_end(self, setup: Setup) -> np.ndarray:
        """[R] bytes of the clients on each rank after the last round."""
        trained = setup.executor.participation.counts(setup.task.training.rounds) > 0
        return replace(self, client=np.where(trained, self.client, self.first)).hosted(setup.placement)


def compute_state_sizes(experiment: Experiment) -> StateSizes:
    """Computes the sizes without allocating the state, which may not fit on this machine."""
    client, first = [], []
    for task, template in zip(experiment.tasks, experiment.templates, strict=True):
        own_start = depends_on_client(experiment.config.algorithm, task)
        common = {OPTIMIZER, RESIDUAL} if own_start else {name for name in template if name != RECEIVED}
        client.append(tree.num_bytes(template))
        first.append(tree.num_bytes({name: value for name, value in template.items() if name not in common}))
    sizes = [_count_server_and_received(experiment, _FEW_CLIENTS + more) for more in range(3)]
    servers, received = zip(*sizes, strict=True)
    more = experiment.federation.num_clients - _FEW_CLIENTS
    return StateSizes(
        client=np.array(client, np.int64)[experiment.cohort],
        first=np.array(first, np.int64)[experiment.cohort],
        server=_extrapolate_size(more, *servers),
        received=_extrapolate_size(more, *received),
    )


def data_bytes(federation: Federation) -> int:
    dataset = federation.dataset
    labels = 2 * dataset.labels.nbytes + dataset.official_test.nbytes  # the pool has labels of its own
    return dataset.images.nbytes + labels + sum(part.nbytes for part in chain(*federation.samples))


def pool_bytes(setup: Setup, rank: int) -> int:
    """Bytes of samples (or cached features) and labels in the memory of a rank."""
    dataset, samples, task = setup.executor.federation.dataset, setup.samples(rank), setup.task
    sample_bytes = 4 * math.prod(task.feature_shape) if task.cached_features else dataset.images[:1].nbytes
    count = len(dataset.labels) if samples is None else len(samples)
    return count * (sample_bytes + dataset.labels[:1].nbytes)


def mapped_bytes(federation: Federation) -> int:
    """Bytes of samples that are mapped from a file, whose pages ranks share."""
    owner: object = federation.dataset.images
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    return federation.dataset.images.nbytes if isinstance(owner, mmap.mmap) else 0


def _count_server_and_received(experiment: Experiment, clients: int) -> tuple[int, int]:
    """Bytes of the server's initial state for so many clients, and of stored messages that are not part of it."""
    algorithm, task = experiment.config.algorithm, experiment.tasks[0].replace(device=HOST, num_clients=clients)
    server = algorithm.init_server(task)
    names = stored_messages(algorithm, task, experiment.templates)
    published = algorithm.publish(task, server, np.arange(clients)) if names else {}
    of_server = {id(leaf) for _, leaf in tree.leaves(server)}
    leaves = tree.leaves({name: published[name] for name in names})
    return tree.num_bytes(server), sum(leaf.nbytes for _, leaf in leaves if id(leaf) not in of_server)


def _extrapolate_size(more: int, first: int, second: int, third: int) -> int:
    """Bytes for `more` clients than `first` has; `second` and `third` have one and two more than it.

    Leaves have a fixed size, or grow with the clients or with pairs of clients, so sizes lie on a parabola.
    """
    return first + more * (second - first) + more * (more - 1) // 2 * (third - 2 * second + first)


# --- checkpoints on disk

_MAX_CHECKPOINTS = 200  # that are computed; later ones are assumed to be like these
_NEVER = -1
# Overhead in bytes of HDF5 and text, as measured in small runs: of a round file, a set of test results in it, and of a
# round's shards.
_ROUND_FILE, _RESULTS, _ROWS_FILE = 20 * 2**10, 6 * 2**10, 16 * 2**10
_SHARED_ROW_BYTES = 2**24  # from so many bytes on, equal rows are surely stored once


@dataclass(frozen=True)
class DiskForecast:
    """Approximate bytes of checkpoints."""

    first: int  # the checkpoint before the first round, with every client
    later: float  # mean of the others
    most: int  # peak of all that are on disk at once
    last: int  # all that stay
    count: int  # number of checkpoints


def forecast_disk(setup: Setup, config: Config, sizes: StateSizes) -> DiskForecast:
    """Computes the bytes of checkpoints from `checkpoint.every` and `checkpoint.keep`; writes nothing."""
    settings = config.checkpoint
    count = 1 + -(-setup.task.training.rounds // settings.every)
    rounds_ahead = schedule(setup, config.evaluation, settings, None)
    saves = list(islice((plan for plan in rounds_ahead if plan.saves), _MAX_CHECKPOINTS))
    rows = np.array([_count_row_bytes(save, sizes) for save in saves])
    round_files = np.array([_count_round_file_bytes(save, sizes) for save in saves])
    written = rows + round_files
    kept = _count_kept_bytes(saves, rows, round_files, settings.keep) if settings.keep else np.cumsum(written)
    most = int((written + np.append(0, kept[:-1])).max())
    later = float(written[1:].mean()) if len(written) > 1 else 0.0
    added = 0.0 if settings.keep else (count - len(saves)) * later
    return DiskForecast(int(written[0]), later, int(most + added), int(kept[-1] + added), count)


def _count_row_bytes(save: RoundSchedule, sizes: StateSizes) -> int:
    """Bytes of the clients' rows that a checkpoint writes."""
    clients = save.unsaved
    if not len(clients):
        return 0
    rows = int(sizes.client[clients].sum())
    if save.opening and rows > _SHARED_ROW_BYTES:  # what all clients of a cohort begin with is one row on each rank
        _, first = np.unique(save.setup.executor.cohort[clients], return_index=True)
        common = int((sizes.client - sizes.first)[clients[first]].sum())
        rows = int(sizes.first[clients].sum()) + common * sum(1 for rows_of_rank in save.rows if len(rows_of_rank))
    return rows + ID_BYTES * len(clients) + _ROWS_FILE


def _count_round_file_bytes(save: RoundSchedule, sizes: StateSizes) -> int:
    """Bytes of a round file: the server, stored messages, and metrics of clients and classes."""
    setup, participants = save.setup, len(save.participants)
    n, validates = setup.task.num_clients, setup.validation is not None
    tested = [n] * (1 + validates) if save.evaluates else []  # clients of each set of results
    if save.tests_trained:
        tested.append(participants)
    if save.unseen:
        tested.append(len(save.unseen.clients))
    result = 8 * (5 + len(setup.executor.measures)) + 4 * 2 * setup.task.num_classes  # of a client
    measured = sum(tested) * result + len(tested) * _RESULTS
    about_clients = 8 * n * (8 + validates) + 8 * 2 * participants  # ids, traffic, samples, places of rows; losses
    return sizes.server + sizes.received + about_clients + measured + _ROUND_FILE


def _count_kept_bytes(
    saves: Sequence[RoundSchedule], rows: np.ndarray, round_files: np.ndarray, keep: int
) -> np.ndarray:
    """Bytes [S] on disk after each checkpoint, at most: the newest `keep` round files, and the shards they need."""
    newest = np.full((len(saves), len(saves[0].setup.executor.cohort)), _NEVER)
    kept_bytes = []
    for number, save in enumerate(saves):
        newest[number] = newest[number - 1] if number else _NEVER
        newest[number, save.unsaved] = number
        kept = slice(max(0, number - keep + 1), number + 1)
        needed = np.unique(newest[kept])
        kept_bytes.append(round_files[kept].sum() + rows[needed[needed != _NEVER]].sum())
    return np.array(kept_bytes)
