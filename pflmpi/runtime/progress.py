"""What rank 0 knows after a round, for the checkpoint, the metrics file and the display."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pflmpi.runtime.evaluation.clients import Scores


@dataclass(frozen=True)
class Progress:
    """What rank 0 knows after a round.

    Attributes:
        round: its number.
        participants: [P] ascending ids of the clients that trained.
        skipped: ascending ids of those that failed, and count as absent.
        scores: None in rounds without an evaluation.
        seconds: `round`, from the end of the round before, or the start, to the end of this one; and its parts on rank
            0: `compute` (of the slowest rank), `exchange`, `evaluation`, and `checkpoint`, for which training waited
            for the checkpoint before this round. The rest of a checkpoint is written while training continues.
        bytes: logical `up`, `down` [N]; `wire_up`, `wire_down` [].
        unseen: of the clients that were kept out of training; None if there are none.
    """

    round: int
    participants: np.ndarray
    skipped: np.ndarray
    scores: Scores | None
    seconds: dict[str, float]
    bytes: dict[str, np.ndarray] = field(default_factory=dict)
    unseen: Scores | None = None

    def line(self) -> list[str | int]:
        """The values of `store.metrics_file.COLUMNS`; accuracies are empty in a round without evaluation."""
        return [
            self.round,
            len(self.participants),
            *_figures(self.scores),
            *(int(self.bytes[name].sum()) for name in ("up", "down", "wire_up", "wire_down")),
            *(f"{self.seconds[name]:.4f}" for name in ("round", "compute", "exchange", "evaluation", "checkpoint")),
            len(self.skipped),
            *_figures(self.unseen),
        ]

    def arrays(self) -> dict[str, np.ndarray]:
        """The metrics of the round as a checkpoint stores them."""
        found = {"participants": self.participants, "skipped": self.skipped}
        found.update({f"seconds_{name}": np.array(value) for name, value in self.seconds.items()})
        for before, scores in (("", self.scores), ("unseen_", self.unseen)):
            if scores is not None:
                each = {"correct": scores.correct, "total": scores.total, "accuracy": scores.accuracy}
                figures = {"accuracy_mean": np.array(scores.mean), "accuracy_weighted": np.array(scores.weighted)}
                found.update({f"{before}{name}": value for name, value in (each | figures).items()})
        return found


def _figures(scores: Scores | None) -> list[str]:
    return ["", "", ""] if scores is None else [f"{v:.6f}" for v in (scores.mean, scores.weighted, scores.spread)]


Observer = Callable[[Progress], None]
