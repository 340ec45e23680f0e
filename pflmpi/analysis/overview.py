"""The table of the runs of a report: what came out of each, in one line."""

from dataclasses import dataclass

import numpy as np

from pflmpi.analysis.series.final import Final
from pflmpi.analysis.series.selection import Shown

COLUMNS = (
    "run",
    "folder",
    "rounds",
    "of",
    "best (%)",
    "in round",
    "last (%)",
    "worst client (%)",
    "up (bytes)",
    "down (bytes)",
    "time (s)",
)
EXPLAINED = (
    "Best and last: accuracy, mean over clients; worst client: its accuracy at the end; bytes: what the messages of "
    "all rounds hold; time: that of all rounds."
)


@dataclass(frozen=True)
class Outcome:
    """What came out of a run; accuracies in percent, mean over clients, NaN where there is none yet."""

    label: str
    folder: str
    rounds: int
    planned: int
    best: float
    best_round: int | None
    last: float
    worst_client: float
    up: int
    down: int
    seconds: float

    def cells(self) -> list[str]:
        """Return the texts of the line, as `COLUMNS` names them; unknown is empty."""
        return [
            self.label,
            self.folder,
            str(self.rounds),
            str(self.planned),
            _number(self.best),
            "" if self.best_round is None else str(self.best_round),
            _number(self.last),
            _number(self.worst_client),
            str(self.up),
            str(self.down),
            _number(self.seconds),
        ]


def outcome(one: Shown, end: Final | None) -> Outcome:
    """Return what came out of a run, from its metrics and the clients' accuracies at its end."""
    columns = one.run.columns
    mean = 100 * columns["accuracy_mean"]
    seen = np.flatnonzero(~np.isnan(mean))
    best = int(seen[mean[seen].argmax()]) if len(seen) else None
    tested = end is not None and not np.isnan(end.accuracy).all()
    return Outcome(
        label=one.label,
        folder=str(one.run.path),
        rounds=len(columns["round"]),
        planned=int(one.run.config.get("training", {}).get("rounds", 0)),
        best=float("nan") if best is None else float(mean[best]),
        best_round=None if best is None else int(columns["round"][best]),
        last=float(mean[seen[-1]]) if len(seen) else float("nan"),
        worst_client=float(np.nanmin(end.accuracy)) if end is not None and tested else float("nan"),
        up=int(columns["up_bytes"].sum()),
        down=int(columns["down_bytes"].sum()),
        seconds=float(columns["seconds"].sum()),
    )


def _number(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.2f}"
