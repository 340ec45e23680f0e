"""What the checkpoints of a run take on disk: each of them, and all that stay, over the whole run; and what time."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import thread_time

import numpy as np

from pflmpi.forecast.sizes import state_sizes
from pflmpi.learning.task import HOST
from pflmpi.run.build import Experiment, client_templates
from pflmpi.run.execute import RankContext, attributes
from pflmpi.runtime import checkpoints as saving
from pflmpi.runtime.evaluation import Scores
from pflmpi.runtime.progress import Progress
from pflmpi.runtime.schedule import RoundSchedule, schedule
from pflmpi.runtime.setup import Setup
from pflmpi.store.checked_hdf5 import Seal
from pflmpi.store.layout import Layout
from pflmpi.store.names import round_path, shard_path
from pflmpi.store.round_file import RoundContent, write_round
from pflmpi.store.shard import write_shard
from pflmpi.transports.detect import ALONE
from pflmpi.transports.inprocess import InProcessTransport

_LOOKED_AT = 200  # checkpoints; later ones are taken to go on like these
_WRITTEN = 12  # round files that are written to see their size; between them it changes evenly
_ROW = 12  # bytes of a client's id and checksum in a shard
_SMALL = 256  # values of a leaf that are written instead of all


@dataclass(frozen=True)
class Disk:
    """Bytes on disk, and seconds.

    Attributes:
        first: the checkpoint before the first round, with every client.
        each: the mean of the others.
        most: all that is there at once, at most.
        last: all that stays.
        count: number of checkpoints.
        seconds: of the processor that rank 0 needs for one, besides that for its bytes. The thread that writes holds
            the interpreter meanwhile, and the training waits for it.
    """

    first: int
    each: float
    most: int
    last: int
    count: int
    seconds: float


@dataclass(frozen=True)
class _Checkpoint:
    after: RoundSchedule
    layout: Layout
    shards: dict[str, int]  # bytes by name


def disk(experiment: Experiment, setup: Setup) -> Disk:
    """What the checkpoints take, with `checkpoint.every` and `checkpoint.keep`."""
    settings, rounds = experiment.config.checkpoint, experiment.config.training.rounds
    overhead = _Overhead(experiment)
    found = list(islice(_checkpoints(experiment, setup, overhead), _LOOKED_AT))
    count = 1 + -(-rounds // settings.every)
    joins, seconds = _round_files(experiment, found)
    sizes = [sum(one.shards.values()) + join for one, join in zip(found, joins, strict=True)]
    shards = {name: size for one in found for name, size in one.shards.items()}
    keep = settings.keep or len(found)
    needed = [set(one.layout.files) for one in found]

    def kept(upto: int) -> int:
        """Return the bytes that stay after a checkpoint."""
        recent = range(max(0, upto - keep + 1), upto + 1)
        names = set[str]().union(*(needed[i] for i in recent)) & shards.keys()  # no shard for clients that keep nothing
        return sum(joins[i] for i in recent) + sum(shards[name] for name in names)

    stay = [kept(upto) for upto in range(len(found))]
    most = max(before + size for before, size in zip([0, *stay], sizes, strict=False))
    each = float(np.mean(sizes[1:])) if len(sizes) > 1 else 0.0
    later = (count - len(found)) * each if settings.keep == 0 else 0.0
    return Disk(sizes[0], each, int(most + later), int(stay[-1] + later), count, seconds + overhead.seconds)


class _Overhead(dict[tuple[int, ...], int]):
    """Bytes of a shard besides its rows, by the cohorts that it has rows of; found as they are asked for.

    Attributes:
        seconds: of the processor, the most for one of them.
    """

    def __init__(self, experiment: Experiment) -> None:
        super().__init__()
        self.seconds = 0.0
        self._templates = saving.templates(client_templates(experiment))

    def __missing__(self, cohorts: tuple[int, ...]) -> int:
        rows = {}
        for number in cohorts:
            name = list(self._templates)[number]
            leaves = {path: np.zeros((1, *shape), dtype) for path, (shape, dtype) in self._templates[name].items()}
            rows[name] = (np.zeros(1, np.int64), leaves)
        payload = sum(_ROW + sum(array.nbytes for array in leaves.values()) for _, leaves in rows.values())
        with tempfile.TemporaryDirectory() as folder:
            path = shard_path(Path(folder), 0, 0)
            began = thread_time()
            write_shard(path, rows)
            self.seconds = max(self.seconds, thread_time() - began)
            self[cohorts] = path.stat().st_size - payload
        return self[cohorts]


def _checkpoints(experiment: Experiment, setup: Setup, overhead: _Overhead) -> Iterator[_Checkpoint]:
    """Yield the checkpoints of a run with their shards."""
    state, layout = state_sizes(experiment), Layout.unwritten(experiment.cohort)
    for after in schedule(setup, None):
        if not after.saves:
            continue
        layout = layout.updated(after.round, after.rows, experiment.cohort)
        keeping = [clients[state.client[clients] > 0] for clients in after.rows]
        shards = {
            str(shard_path(Path(), after.round, rank)): overhead[tuple(np.unique(experiment.cohort[clients]).tolist())]
            + int(state.client[clients].sum())
            + _ROW * len(clients)
            for rank, clients in enumerate(keeping)
            if len(clients)
        }
        yield _Checkpoint(after, layout, shards)


def _round_files(experiment: Experiment, checkpoints: list[_Checkpoint]) -> tuple[list[int], float]:
    """Return the bytes of the round files, and the seconds of the processor for one."""
    templates = saving.templates(client_templates(experiment))
    described = attributes(experiment, RankContext(InProcessTransport(), ALONE, HOST, 1), "0" * 16)
    server = state_sizes(experiment).server
    stand_in = {path: np.zeros(min(count, _SMALL), dtype) for path, (count, dtype) in server.items()}
    left_out = sum((count - len(stand_in[path])) * dtype.itemsize for path, (count, dtype) in server.items())
    written = np.unique(np.linspace(0, len(checkpoints) - 1, _WRITTEN).astype(int))
    sizes, seconds, zero = [], [], np.zeros(experiment.federation.num_clients, np.int64)
    for index in written:
        one = checkpoints[index]
        round, told = one.after.round, None if one.after.opening else _progress(one.after)
        metrics, moved = ({}, {}) if told is None else (told.arrays(), told.bytes)
        with tempfile.TemporaryDirectory() as folder:
            began = thread_time()
            content = RoundContent(round, stand_in, metrics, moved, partition={"train": zero, "test": zero})
            seals = dict.fromkeys(one.layout.files, Seal(0, 0))
            write_round(Path(folder), content, one.layout, templates, described, seals)
            seconds.append(thread_time() - began)
            sizes.append(round_path(Path(folder), round).stat().st_size + left_out)
    return [int(size) for size in np.interp(np.arange(len(checkpoints)), written, sizes)], float(np.median(seconds))


def _progress(after: RoundSchedule) -> Progress:
    """What a checkpoint holds of its round, in size."""
    zero = np.zeros(after.setup.task.num_clients, np.int64)
    return Progress(
        after.round,
        after.participants,
        Scores(zero, zero) if after.evaluates else None,
        dict.fromkeys(("compute", "exchange", "evaluation", "checkpoint", "round"), 0.0),
        {"up": zero, "down": zero, "wire_up": np.array(0), "wire_down": np.array(0)},
    )
