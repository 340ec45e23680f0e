"""What rank 0 knows after a round, for the checkpoint, the metrics file and the display."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pflmpi.runtime.evaluation import Scores


@dataclass(frozen=True)
class Progress:
    """What rank 0 knows after a round."""

    round: int
    participants: np.ndarray
    scores: Scores | None  # None in rounds without an evaluation
    seconds: dict[str, float]  # whole round, and its parts on rank 0; `compute` is the slowest rank's
    bytes: dict[str, np.ndarray] = field(default_factory=dict)  # logical `up`, `down` [N]; `wire_up`, `wire_down` []


Observer = Callable[[Progress], None]
