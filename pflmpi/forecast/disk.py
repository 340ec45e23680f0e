"""What the checkpoints of a run take on disk: one of them, and all that stay; and seconds of the processor."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from time import thread_time

import numpy as np

from pflmpi.experiment.build import Experiment
from pflmpi.experiment.stored_config import attributes
from pflmpi.forecast.bytes import Leaves, StateSizes, leaf_bytes
from pflmpi.forecast.first_shards import in_common
from pflmpi.runtime.client_state import row_kinds
from pflmpi.runtime.evaluation.measures import Counts
from pflmpi.runtime.progress import Progress
from pflmpi.runtime.round_schedule import RoundSchedule
from pflmpi.runtime.schedule import schedule
from pflmpi.runtime.setup import Setup
from pflmpi.store.checked_hdf5 import Checksum
from pflmpi.store.layout import NOWHERE, Layout
from pflmpi.store.names import round_path, shard_name, shard_path
from pflmpi.store.records import sharing
from pflmpi.store.records.content import Checkpoint, pack
from pflmpi.store.records.segments import RecordFile
from pflmpi.store.round_file import ReceivedMessage, RoundContent, write_round
from pflmpi.store.shard import ID_BYTES, write_shard
from pflmpi.transports.inprocess import InProcessTransport

_LOOKED_AT = 200  # checkpoints; later ones are taken to be like these
_WRITTEN = 6  # round files
_RUN = "0" * 16  # in place of the id of the run
_FEW = 1024  # values of a leaf that are written instead of all; more than a block that HDF5 shares between small arrays


@dataclass(frozen=True)
class Disk:
    """Bytes on disk, and seconds.

    Attributes:
        first: the checkpoint before the first round, with every client.
        each: the mean of the others.
        most: all that is there at once, at most.
        last: all that stays.
        count: number of checkpoints.
        seconds: of the processor to record one on rank 0, besides that for its bytes.
    """

    first: int
    each: float
    most: int
    last: int
    count: int
    seconds: float


@dataclass(frozen=True)
class _Shards:
    """Shards after each of S checkpoints; one is known by checkpoint * R + the first rank with rows in it.

    Attributes:
        bytes: [S, R] of each shard.
        newest: [S, N] the shard with the newest row of each client; -1 for none.
        row: [S, N] the row in it.
    """

    bytes: np.ndarray
    newest: np.ndarray
    row: np.ndarray

    def layout(self, number: int, saves: Sequence[RoundSchedule], cohort: np.ndarray) -> Layout:
        """Layout after a checkpoint."""
        newest, ranks = self.newest[number], self.bytes.shape[1]
        used, file = np.unique(newest, return_inverse=True)
        missing = int(used[0] == NOWHERE)
        names = tuple(shard_name(saves[key // ranks].round, key % ranks) for key in used[missing:].tolist())
        return Layout(Layout.unwritten(cohort).cohorts, file - missing, self.row[number], names)


def disk(experiment: Experiment, setup: Setup, sizes: StateSizes) -> Disk:
    """What the checkpoints take, with `checkpoint.every` and `checkpoint.keep`."""
    settings = setup.checkpoint
    count = 1 + -(-experiment.config.training.rounds // settings.every)
    saves = list(islice((one for one in schedule(setup, None) if one.saves), _LOOKED_AT))
    shards = _shards(experiment, setup, saves, sizes, _shard_header(experiment))
    files, seconds = _round_files(experiment, saves, shards, sizes)
    each = shards.bytes.sum(1) + files
    stays = _stays(shards, files, settings.keep) if settings.keep else np.cumsum(each)
    most = int((each + np.append(0, stays[:-1])).max())
    later = float(each[1:].mean()) if len(each) > 1 else 0.0
    added = 0.0 if settings.keep else (count - len(saves)) * later
    return Disk(int(each[0]), later, int(most + added), int(stays[-1] + added), count, seconds)


def _shards(
    experiment: Experiment, setup: Setup, saves: Sequence[RoundSchedule], sizes: StateSizes, header: int
) -> _Shards:
    """What is written for each checkpoint: the clients that have changed."""
    cohort, ranks, n = experiment.cohort, setup.placement.ranks, len(experiment.cohort)
    hosts = np.zeros(n, np.int64) if setup.placement.home is None else setup.placement.home
    whole = sharing.row_bytes(row_kinds(experiment.templates), cohort)
    found = _Shards(np.zeros((len(saves), ranks), np.int64), *np.full((2, len(saves), n), NOWHERE, np.int64))
    for number, save in enumerate(saves):
        if number:
            found.newest[number], found.row[number] = (found.newest[number - 1], found.row[number - 1])
        changed = save.unsaved
        home = sharing.first_ranks(np.bincount(hosts[changed], whole[changed], ranks).tolist())[hosts]
        part = home[changed] * len(experiment.tasks) + cohort[changed]  # rows are counted within a cohort of a shard
        order = np.argsort(part, kind="stable")
        first = np.flatnonzero(np.diff(part[order], prepend=-1))
        found.row[number, changed[order]] = np.arange(len(changed)) - np.repeat(first, np.diff([*first, len(changed)]))
        found.newest[number, changed] = number * ranks + home[changed]
        row_bytes = (sizes.first if save.opening else sizes.client)[changed] + ID_BYTES
        rows = np.bincount(home[changed], row_bytes, ranks)
        found.bytes[number] = rows + header * np.bincount(home[changed[order[first]]], minlength=ranks)
        if save.opening:
            found.bytes[number] += in_common(experiment, home[changed], cohort[changed], ranks)
    return found


def _stays(shards: _Shards, files: np.ndarray, keep: int) -> np.ndarray:
    """Bytes [S] that stay after each checkpoint: the newest round files, and the shards that they need."""
    found = []
    for last in range(len(files)):
        kept = slice(max(0, last - keep + 1), last + 1)
        needed = np.zeros(shards.bytes.size + 1, bool)
        needed[shards.newest[kept]] = True  # -1, for none, is the last
        found.append(files[kept].sum() + shards.bytes.ravel()[needed[:-1]].sum())
    return np.array(found)


def _shard_header(experiment: Experiment) -> int:
    """Bytes of a shard besides its rows, for each cohort in it."""
    rows = {
        name: (np.zeros(1, np.int64), {path: np.zeros((1, *shape), dtype) for path, (shape, dtype) in leaves.items()})
        for name, leaves in row_kinds(experiment.templates).items()
    }
    payload = sum(ID_BYTES + sum(array.nbytes for array in leaves.values()) for _, leaves in rows.values())
    with tempfile.TemporaryDirectory() as folder:
        write_shard(path := shard_path(Path(folder), 0, 0), rows, {"run": _RUN, "round": 0, "rank": 0})
        return (path.stat().st_size - payload) // len(rows)


def _round_files(
    experiment: Experiment, saves: Sequence[RoundSchedule], shards: _Shards, sizes: StateSizes
) -> tuple[np.ndarray, float]:
    """Bytes [S] of each round file, and the seconds of the processor to record one.

    A few are written, with a small server's state; between them the sizes change evenly.
    """
    described, cohort = (attributes(experiment, InProcessTransport(), _RUN), experiment.cohort)
    templates = row_kinds(experiment.templates)
    server, messages = _stand_in(sizes.server), _stand_in(sizes.received)
    links = {path: server[target] for path, target in sizes.links.items()}
    written = sum(array.nbytes for array in (*server.values(), *messages.values()))
    left_out = sizes.server_bytes + leaf_bytes(sizes.received) - written

    def write(index: int) -> tuple[int, float]:
        content, layout = (_content(saves[index], server, messages | links), shards.layout(index, saves, cohort))
        checksums = dict.fromkeys(layout.files, Checksum(0, 0))
        with tempfile.TemporaryDirectory() as folder:
            records = RecordFile(run := Path(folder), 0)
            write_round(run, content, layout, templates, described, checksums)
            began = thread_time()
            records.append(pack(content.round, {}, Checkpoint(content, layout, templates, described, {}, 0)))
            return round_path(run, content.round).stat().st_size + left_out, thread_time() - began

    indices = np.unique(np.geomspace(1, len(saves), _WRITTEN).astype(int)) - 1  # the shards in use grow less and less
    found, seconds = zip(*map(write, indices), strict=True)
    return np.interp(np.arange(len(saves)), indices, found).astype(np.int64), float(np.median(seconds))


def _stand_in(leaves: Leaves) -> dict[str, np.ndarray]:
    return {path: np.zeros(min(count, _FEW), dtype) for path, (count, dtype) in leaves.items()}


def _content(save: RoundSchedule, server: dict[str, np.ndarray], messages: dict[str, np.ndarray]) -> RoundContent:
    """What a checkpoint holds of its round, in size; without what algorithms measure, which is little."""
    zero = np.zeros(save.setup.task.num_clients, np.int64)
    content = RoundContent(
        save.round,
        server,
        received={"all": ReceivedMessage(messages, own=False)} if messages else {},
        partition={"train_samples": zero, "test_samples": zero},
        normalisation=save.setup.task.normalisation,
    )
    if save.opening:
        return content
    by_class = np.zeros((len(zero), save.setup.task.num_classes), np.int64)
    scores = Counts.none(by_class) if save.evaluates else None
    seconds = dict.fromkeys(("compute", "exchange", "waiting", "evaluation", "checkpoint", "round"), 0.0)
    moved = {"up": zero, "down": zero, "wire_up": np.array(0), "wire_down": np.array(0)}
    progress = Progress(save.round, save.participants, save.skipped, scores, seconds, moved)
    return replace(content, metrics=progress.arrays(), bytes=progress.bytes)
