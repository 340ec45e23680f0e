"""Progress of a run, read from its folder alone: cheap, and safe while the run writes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from pflmpi.config import stored
from pflmpi.errors import CheckpointError
from pflmpi.learning.early_stop import EarlyStop
from pflmpi.store import config_file, metrics_file, names, verify
from pflmpi.text import short_name

_UNSEEN = "unseen_accuracy_mean"
_WINDOW = 10  # rounds over which the speed is measured


@dataclass(frozen=True)
class RunStatus:
    """Progress of a run.

    Attributes:
        title: algorithm and data, for display.
        round: the last round in the metrics file; 0 before the first has ended.
        rounds: of the whole run.
        accuracy: of the last tested round, mean over clients; None before the first.
        best: the best such accuracy and its round.
        checkpoint: newest round with a checkpoint, not verified; None without any.
        per_round: seconds per round; None before the first has ended.
        age: seconds since the last round ended, by the clocks of the file system and of this machine.
        unseen: accuracy of the unseen clients in the last tested round, mean; None without any.
        ranks: that compute it, or did last; None if unknown.
        early: why it has ended before its last round; "" if it has not.
        notes: what of this no checkpoint vouches for.
        problem: why nothing of this can be shown; "" if it can.
    """

    title: str
    round: int
    rounds: int
    accuracy: float | None
    best: tuple[float, int] | None
    checkpoint: int | None
    per_round: float | None
    age: float | None
    unseen: float | None = None
    ranks: int | None = None
    early: str = ""
    notes: tuple[str, ...] = ()
    problem: str = ""

    @property
    def done(self) -> bool:
        """Whether the last round has ended and its checkpoint exists."""
        last = self.round if self.early else self.rounds
        return last > 0 and min(self.round, self.checkpoint or 0) >= last

    @property
    def to_end(self) -> float | None:
        """Seconds to the end of the run at its speed so far; None if unknown."""
        left = 0 if self.early else max(self.rounds - self.round, 0)
        return None if self.per_round is None else self.per_round * left


def run_status(run: Path, since: float | None = None) -> RunStatus | None:
    """Progress of a run; None if there is no run in the folder.

    Args:
        since: start of the process that runs it now, in seconds since the epoch; None if nothing runs it.
    """
    if not config_file.path(run).exists():
        return None
    try:
        config, notes = stored.verified(run)
        rounds = int(config["training"]["rounds"])
        title = f"{short_name(str(config['algorithm']['name']))} on {config['data']['name']}"
        ranks = int(config.get("recorded", {}).get("ranks", 0)) or None
        metrics = verify.metrics(run, rounds)
        lines = metrics.lines
        early = EarlyStop.of(config["training"], lines).why
    except CheckpointError as error:
        return RunStatus("damaged", 0, 0, None, None, None, None, None, problem=str(error))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    tested = [
        (accuracy, int(line["round"]))
        for line in lines
        if (accuracy := _number(line.get("accuracy_mean", ""))) is not None
    ]
    checkpoints = names.rounds(run)
    return RunStatus(
        title=title,
        round=int(lines[-1]["round"]) if lines else 0,
        rounds=rounds,
        accuracy=tested[-1][0] if tested else None,
        best=max(tested, key=lambda one: (one[0], -one[1])) if tested else None,
        unseen=next((share for line in reversed(lines) if (share := _number(line.get(_UNSEEN, ""))) is not None), None),
        checkpoint=checkpoints[-1] if checkpoints else None,
        per_round=_per_round(run, lines, checkpoints, since),
        age=_age(metrics_file.path(run)) if lines else None,
        ranks=ranks,
        early=early,
        notes=(*notes, *metrics.notes),
    )


def _per_round(
    run: Path, lines: Sequence[dict[str, str]], checkpoints: Sequence[int], since: float | None
) -> float | None:
    """Seconds per round: the longer of the median of the metrics and the median time between checkpoints.

    Medians, because the first round of each process warms up and may take many times as long. That of the metrics
    leaves out what only some rounds do as well, such as a checkpoint or a test every tenth, which the time between
    checkpoints includes. Checkpoints of an earlier job do not count: between them and the newer ones the run stood
    still.
    """
    seconds = [value for line in lines if (value := _number(line.get("seconds", ""))) is not None]
    if not seconds:
        return None
    recent = seconds[1:][-_WINDOW:] or seconds
    written = [(round, at) for round in checkpoints[-_WINDOW:] if (at := _written(names.round_path(run, round)))]
    written = [one for one in written if since is not None and one[1] > since]
    between = [(at - before) / (round - last) for (last, before), (round, at) in pairwise(written)]
    return max(median(recent), median(between or [0.0]))


def _written(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None  # pruned meanwhile


def _age(path: Path) -> float | None:
    written = _written(path)
    return None if written is None else max(time.time() - written, 0.0)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
