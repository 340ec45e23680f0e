"""The progress of a run, read from its folder, and as text."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import mean, median

from pflmpi.cluster.jobs import Job
from pflmpi.config import stored
from pflmpi.errors import CheckpointError, Stopped
from pflmpi.learning.early_stop import EarlyStop
from pflmpi.learning.main_measure import ACCURACY, MainMeasure, summarize_rounds
from pflmpi.store import config_file, metrics_file, names, verify
from pflmpi.text import pluralize, short_name

_WINDOW = 10  # rounds over which the speed is measured


@dataclass(frozen=True)
class RunStatus:
    """Progress of a run.

    Attributes:
        title: algorithm and data, for display.
        round: the last round in the metrics file; 0 before the first has ended.
        rounds: of the whole run.
        last: mean over clients of the main measure in the last tested round; None before the first test.
        best: the main measure in the best round (chosen by validation samples if there are any), and that round.
        checkpoint: newest round with a checkpoint, not verified; None if there is none.
        per_round: seconds per round; None before the first has ended, or if no round has them.
        age: seconds since the last round ended, by the clocks of the file system and of this machine.
        unseen: the main measure of the unseen clients in the last tested round; None if there are no such clients.
        ranks: number of ranks that run it, or ran it last; None if unknown.
        early: why it stopped before its last round; "" if it did not.
        notes: which of these values no checkpoint confirms.
        privacy: what `uplink.noise` guarantees its clients.
        problem: why the run cannot be read; "" if it can.
        measure: the main measure.
    """

    title: str = ""
    round: int = 0
    rounds: int = 0
    last: float | None = None
    best: tuple[float, int] | None = None
    checkpoint: int | None = None
    per_round: float | None = None
    age: float | None = None
    unseen: float | None = None
    ranks: int | None = None
    early: str = ""
    notes: tuple[str, ...] = ()
    privacy: str = ""
    problem: str = ""
    measure: MainMeasure = ACCURACY

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


def read_run_status(run: Path) -> RunStatus | None:
    """Progress of a run; None if there is no run in the folder."""
    if not (config_file.is_of_run(run) or names.rounds(run)):
        return None
    try:
        config, notes = stored.read_verified(run)
        rounds = int(config["training"]["rounds"])
        title = f"{short_name(str(config['algorithm']['name']))} on {config['data']['name']}"
        ranks = int(config.get("recorded", {}).get("ranks", 0)) or None
        privacy = str(config.get("recorded", {}).get("privacy", ""))
        metrics = verify.metrics(run, rounds)
        lines = metrics.lines
        age = max(time.time() - metrics_file.path(run).stat().st_mtime, 0.0) if lines else None
        early = EarlyStop.of(config["training"], lines).why
        tested = summarize_rounds(config, lines)
    except CheckpointError as error:
        return RunStatus("damaged", problem=str(error))
    except (KeyError, TypeError, ValueError, AttributeError, FileNotFoundError):  # the last: deleted meanwhile
        return None
    column = tested.measure.column
    checkpoints = names.rounds(run)
    return RunStatus(
        title=title,
        round=int(lines[-1]["round"]) if lines else 0,
        rounds=rounds,
        last=tested.last[column] if tested.last else None,
        best=(tested.best[column], int(tested.best["round"])) if tested.best else None,
        unseen=tested.last.get(f"unseen_{column}") if tested.last else None,
        checkpoint=checkpoints[-1] if checkpoints else None,
        per_round=estimate_seconds_per_round(lines),
        age=age,
        ranks=ranks,
        early=early,
        notes=(*notes, *metrics.notes),
        privacy=privacy,
        measure=tested.measure,
    )


def estimate_seconds_per_round(lines: Sequence[Mapping[str, str | float]]) -> float | None:
    """Seconds per round over the last rounds that have them, without the first of these; None if there is none.

    Training and messages count with their median, because the first round of each process warms up and may take many
    times as long. Tests and checkpoints, which not every round has, count with their mean.
    """
    timed = [line for line in lines if line.get("seconds", "") != ""]  # a round whose metrics were lost has none
    recent = timed[1:][-_WINDOW:] or timed[:1]
    if not recent:
        return None
    occasional = [_seconds(line, "evaluation_seconds") + _seconds(line, "checkpoint_seconds") for line in recent]
    regular = [_seconds(line, "seconds") - other for line, other in zip(recent, occasional, strict=True)]
    return median(regular) + mean(occasional)


def _seconds(line: Mapping[str, str | float], column: str) -> float:
    """Seconds in a column of metrics.csv; 0 where it is missing or no number."""
    try:
        return float(line.get(column, "") or 0.0)
    except ValueError:
        return 0.0


def format_progress(run: RunStatus, job: Job | None) -> Iterator[str]:
    """Lines on a run's progress and speed, and whether the job will finish within its time limit."""
    if run.problem:
        yield run.problem
        return
    yield _format_round(run)
    yield from run.notes
    if run.privacy:
        yield run.privacy
    if run.early:
        yield f"stopped early: {run.early}"
    if run.per_round is not None:
        yield _format_speed(run, job)
    if run.done:
        return
    if job is None:
        yield "not finished: `pflmpi resume` continues it, unless it is running elsewhere"
    elif not job.in_queue:
        stopped = (
            "stopped after a complete round" if job.exit_code == Stopped.exit_code else "ended before the last round"
        )
        yield f"{stopped}; what is complete is kept: submit the same again, and it continues (or `pflmpi resume`)"
    elif (missing := _seconds_missing(run, job)) > 0:
        assert run.per_round is not None
        fitting = int((_seconds_left(job) or 0.0) / run.per_round)
        in_time = f"about {fitting} of the {run.rounds - run.round} rounds left end in time"
        if _will_continue(job):
            yield f"{in_time}; then the job is requeued and continues"
            return
        yield (
            f"IT WILL NOT FIT: {format_duration(missing)} too little, {in_time}; what is complete is kept: submit the "
            "same again when it has ended, with more --time, or with --requeue, by which a job continues by itself"
        )


def summarize_progress(run: RunStatus | None, job: Job | None) -> str:
    """Progress of a run, and its speed unless it is done, in one line."""
    if run is None:
        return "not begun"
    if run.problem:
        return run.problem
    words = [f"round {run.round} of {run.rounds}{', stopped early' * bool(run.early)}"]
    words += [f"{run.measure.words} {run.measure.text(run.last)}"] if run.last is not None else []
    words += run.notes
    if not run.done and run.per_round is not None:
        late = job is not None and job.active and not _will_continue(job) and _seconds_missing(run, job) > 0
        words.append(f"{_format_speed(run, job)}{': IT WILL NOT FIT' * late}")
    return ", ".join(words)


def format_duration(seconds: float) -> str:
    """A duration for display.

    >>> format_duration(58.3), format_duration(93630)
    ('0:00:58', '1 day, 2:00:30')
    """
    return str(timedelta(seconds=round(seconds)))


def _format_round(run: RunStatus) -> str:
    words = [f"round {run.round} of {run.rounds}"]
    if run.ranks is not None:
        words.append(pluralize(run.ranks, "rank"))
    if run.last is not None and run.best is not None:
        last, best = map(run.measure.text, (run.last, run.best[0]))
        words.append(f"{run.measure.words} {last} (best {best} in round {run.best[1]})")
    words += [f"unseen clients {run.measure.text(run.unseen)}"] if run.unseen is not None else []
    words.append("no checkpoint yet" if run.checkpoint is None else f"newest checkpoint of round {run.checkpoint}")
    return ", ".join(words)


def _format_speed(run: RunStatus, job: Job | None) -> str:
    words = [f"{run.per_round:.2f} s per round"]
    if run.age is not None:
        words.append(f"the last one ended {format_duration(run.age)} ago")
    if not run.done and run.to_end is not None:
        words.append(f"{format_duration(run.to_end)} to the end")
    if job is not None and job.in_queue:
        left = _seconds_left(job)
        words.append(
            "no time limit" if left is None else f"{format_duration(left)} left of {format_duration(job.limit or 0.0)}"
        )
    return ", ".join(words)


def _seconds_left(job: Job) -> float | None:
    """Seconds before the job's time limit; None without one."""
    return None if job.limit is None else max(job.limit - job.seconds, 0.0)


def _seconds_missing(run: RunStatus, job: Job) -> float:
    """Seconds that the run needs beyond the job's time limit; negative if it ends in time."""
    left = _seconds_left(job)
    return 0.0 if left is None or run.to_end is None else run.to_end - left


def _will_continue(job: Job) -> bool:
    """Whether a job will be requeued at its time limit: it was submitted so, or it has restarted before."""
    return job.requeues or job.restarts > 0
