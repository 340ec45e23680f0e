"""What the checkpoints of a run take on disk: one of them, and all that stay."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from pflmpi.config.load import Config
from pflmpi.forecast.bytes import StateSizes, leaf_bytes
from pflmpi.runtime.round_schedule import RoundSchedule, schedule
from pflmpi.runtime.setup import Setup
from pflmpi.store.shard import ID_BYTES

_LOOKED_AT = 200  # checkpoints; later ones are taken to be like these
_NEVER = -1
# Bytes of HDF5 and of text, as files of small runs have them: of a round file, and of the clients' rows of a round.
_ROUND_FILE, _ROWS_FILE = 20 * 2**10, 16 * 2**10
_ONCE = 2**24  # bytes of rows from which on equal ones are surely stored once


@dataclass(frozen=True)
class Disk:
    """Bytes on disk, about: what is kept, and some for files; see `_ROUND_FILE`.

    Attributes:
        first: the checkpoint before the first round, with every client.
        each: the mean of the others.
        most: all that is there at once, at most.
        last: all that stays.
        count: number of checkpoints.
    """

    first: int
    each: float
    most: int
    last: int
    count: int


def disk(setup: Setup, config: Config, sizes: StateSizes) -> Disk:
    """What the checkpoints take, with `checkpoint.every` and `checkpoint.keep`; nothing is written."""
    settings = config.checkpoint
    count = 1 + -(-setup.task.training.rounds // settings.every)
    rounds_ahead = schedule(setup, config.evaluation, settings, None)
    saves = list(islice((now for now in rounds_ahead if now.saves), _LOOKED_AT))
    rows, rounds = np.array([_rows(one, sizes) for one in saves]), np.array([_round(one, sizes) for one in saves])
    each = rows + rounds
    stays = _stays(saves, rows, rounds, settings.keep) if settings.keep else np.cumsum(each)
    most = int((each + np.append(0, stays[:-1])).max())
    later = float(each[1:].mean()) if len(each) > 1 else 0.0
    added = 0.0 if settings.keep else (count - len(saves)) * later
    return Disk(int(each[0]), later, int(most + added), int(stays[-1] + added), count)


def _rows(save: RoundSchedule, sizes: StateSizes) -> int:
    """Bytes of the rows of clients that a checkpoint writes."""
    clients = save.unsaved
    if not len(clients):
        return 0
    rows = int(sizes.client[clients].sum())
    if save.opening and rows > _ONCE:  # what all clients of a cohort begin with is one row on each rank
        _, first = np.unique(save.setup.executor.cohort[clients], return_index=True)
        common = int((sizes.client - sizes.first)[clients[first]].sum())
        rows = int(sizes.first[clients].sum()) + common * sum(1 for mine in save.rows if len(mine))
    return rows + ID_BYTES * len(clients) + _ROWS_FILE


def _round(save: RoundSchedule, sizes: StateSizes) -> int:
    """Bytes of a round file: the server, messages that models are made of, and numbers of clients and classes."""
    n, classes = save.setup.task.num_clients, save.setup.task.num_classes
    measured = 8 * n * (4 + (2 * classes + 2) * save.evaluates)
    return sizes.server_bytes + leaf_bytes(sizes.received) + measured + _ROUND_FILE


def _stays(saves: Sequence[RoundSchedule], rows: np.ndarray, rounds: np.ndarray, keep: int) -> np.ndarray:
    """Bytes [S] that stay after each checkpoint, at most: the newest round files, and the rows files they need."""
    newest = np.full((len(saves), len(saves[0].setup.executor.cohort)), _NEVER)
    found = []
    for last, save in enumerate(saves):
        newest[last] = newest[last - 1] if last else _NEVER
        newest[last, save.unsaved] = last
        kept = slice(max(0, last - keep + 1), last + 1)
        needed = np.unique(newest[kept])
        found.append(rounds[kept].sum() + rows[needed[needed != _NEVER]].sum())
    return np.array(found)
