"""What the shards of the first checkpoint hold that all clients begin with: one row of it, shown for each client."""

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from pflmpi import tree
from pflmpi.experiment.build import Experiment
from pflmpi.forecast.bytes import own_at_first
from pflmpi.runtime.client_state import row_kinds
from pflmpi.store.names import shard_path
from pflmpi.store.shard import ID_BYTES, write_shard


def in_common(experiment: Experiment, home: np.ndarray, cohort: np.ndarray, ranks: int) -> np.ndarray:
    """Bytes [R] by which the first shards are larger for what all clients of a cohort begin with.

    Args:
        home, cohort: [m] of the clients that keep anything.
    """
    found, own = np.zeros(ranks, np.int64), own_at_first(experiment)
    for number, (kinds, template) in enumerate(zip(row_kinds(experiment.templates).values(), own, strict=True)):
        owned = {path for path, _ in tree.leaves(template)}
        common = {path: kind for path, kind in kinds.items() if path not in owned}
        counts = np.bincount(home[cohort == number], minlength=ranks)
        for count in np.unique(counts[counts > 0]).tolist() if common else ():
            found[counts == count] += _common_bytes(common, count)
    return found


def _common_bytes(kinds: Mapping[str, tuple[tuple[int, ...], np.dtype]], clients: int) -> int:
    """Bytes of leaves of which all clients of a shard have the same row."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = []
        for many in (False, True):
            count = clients if many else 1
            rows = {
                path: np.broadcast_to(np.zeros((1, *shape), dtype), (count, *shape))
                for path, (shape, dtype) in kinds.items()
            }
            path = shard_path(Path(folder), 0, int(many))
            write_shard(path, {"cohort0": (np.arange(count), rows)})
            sizes.append(path.stat().st_size)
        one_row = sum(math.prod(shape) * dtype.itemsize for shape, dtype in kinds.values())
        return sizes[1] - sizes[0] + one_row - ID_BYTES * (clients - 1)
