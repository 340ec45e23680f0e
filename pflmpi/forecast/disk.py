"""What the checkpoints of a run take on disk: each of them, and all that stay, over the whole run; and what time."""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import thread_time

import numpy as np

from pflmpi.config.yaml_file import dump
from pflmpi.forecast.sizes import state_sizes
from pflmpi.learning.task import HOST
from pflmpi.run.build import Experiment, client_templates
from pflmpi.run.execute import RankContext, recorded
from pflmpi.runtime import checkpoints as saving
from pflmpi.runtime.evaluation import Scores
from pflmpi.runtime.placement import Placement
from pflmpi.runtime.progress import Progress
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
    round: int
    layout: Layout
    shards: dict[str, int]  # bytes by name


def disk(experiment: Experiment, placement: Placement) -> Disk:
    """Return what the checkpoints take, with `checkpoint.every` and `checkpoint.keep`."""
    settings, training = experiment.config.checkpoint, experiment.config.training
    rounds = [*range(0, training.rounds, settings.every), training.rounds]
    looked_at = rounds[:_LOOKED_AT]
    overhead = _Overhead(experiment)
    found = list(_checkpoints(experiment, placement, looked_at, overhead))
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
    later = (len(rounds) - len(looked_at)) * each if settings.keep == 0 else 0.0
    return Disk(sizes[0], each, int(most + later), int(stay[-1] + later), len(rounds), seconds + overhead.seconds)


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


def _checkpoints(
    experiment: Experiment, placement: Placement, rounds: list[int], overhead: _Overhead
) -> Iterator[_Checkpoint]:
    """Yield the checkpoints with their shards, as `runtime.checkpoints` writes them."""
    training, n = experiment.config.training, experiment.federation.num_clients
    state = state_sizes(experiment)
    hosted = [placement.hosted(rank) for rank in range(placement.ranks)]
    layout, last = Layout.unwritten(experiment.cohort), 0
    for round in rounds:
        since = [training.participants(experiment.config.seed, each, n) for each in range(last + 1, round + 1)]
        changed = np.unique(np.concatenate(since)) if round else np.arange(n)
        per_rank = [clients[np.isin(clients, changed)] for clients in hosted]
        layout, last = layout.updated(round, per_rank, experiment.cohort), round
        keeping = [clients[state.client[clients] > 0] for clients in per_rank]
        shards = {
            str(shard_path(Path(), round, rank)): overhead[tuple(np.unique(experiment.cohort[clients]).tolist())]
            + int(state.client[clients].sum())
            + _ROW * len(clients)
            for rank, clients in enumerate(keeping)
            if len(clients)
        }
        yield _Checkpoint(round, layout, shards)


def _round_files(experiment: Experiment, checkpoints: list[_Checkpoint]) -> tuple[list[int], float]:
    """Return the bytes of the round files, and the seconds of the processor for one."""
    templates = saving.templates(client_templates(experiment))
    place = RankContext(InProcessTransport(), ALONE, HOST, 1)
    attributes: dict[str, str | int | float] = {"config": dump(experiment.config.resolved())}
    for name, value in recorded(experiment, place).items():
        attributes[name] = value if isinstance(value, str | int) else json.dumps(value)
    server = state_sizes(experiment).server
    stand_in = {path: np.zeros(min(count, _SMALL), dtype) for path, (count, dtype) in server.items()}
    left_out = sum((count - len(stand_in[path])) * dtype.itemsize for path, (count, dtype) in server.items())
    written = np.unique(np.linspace(0, len(checkpoints) - 1, _WRITTEN).astype(int))
    sizes, seconds = [], []
    for index in written:
        one = checkpoints[index]
        metrics, moved = saving._metrics(_progress(experiment, one.round), one.round)
        with tempfile.TemporaryDirectory() as folder:
            began = thread_time()
            write_round(
                Path(folder), RoundContent(one.round, stand_in, metrics, moved), one.layout, templates, attributes
            )
            seconds.append(thread_time() - began)
            sizes.append(round_path(Path(folder), one.round).stat().st_size + left_out)
    return [int(size) for size in np.interp(np.arange(len(checkpoints)), written, sizes)], float(np.median(seconds))


def _progress(experiment: Experiment, round: int) -> Progress | None:
    """Return what a checkpoint tells of its round."""
    if round == 0:
        return None
    config, n = experiment.config, experiment.federation.num_clients
    due = round % config.evaluation.every == 0 or round == config.training.rounds
    zero = np.zeros(n, np.int64)
    return Progress(
        round,
        config.training.participants(config.seed, round, n),
        Scores(zero, zero) if due else None,
        dict.fromkeys(("compute", "exchange", "evaluation", "checkpoint", "round"), 0.0),
        {"up": zero, "down": zero, "wire_up": np.array(0), "wire_down": np.array(0)},
    )
