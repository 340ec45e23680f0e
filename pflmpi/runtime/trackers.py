"""Trackers, which receive the metrics of each round: TensorBoard, Weights & Biases, MLflow, and users' own classes."""

import inspect
import logging
import math
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from time import time
from typing import Any, ClassVar

from pflmpi.errors import ConfigError, PflmpiError, RunError, TransportError
from pflmpi.machine import expand_path
from pflmpi.registry import Registry
from pflmpi.runtime.config import OutputConfig
from pflmpi.runtime.faults import CollectiveError
from pflmpi.runtime.progress import Observer, Progress
from pflmpi.store import events_file, metrics_file
from pflmpi.text import first_line, for_shell

Line = Mapping[str, str | int]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrackedRun:
    """The run that is tracked."""

    folder: Path
    id: str  # the same after a resume
    options: Mapping[str, Any]  # the configuration by `section.key`
    ranks: int = 1  # current number of ranks
    checkpoints: Sequence[int] = ()  # rounds whose checkpoint this process has completed; grows


class Tracker(ABC):
    """Shows the rounds of a run elsewhere; only rank 0 has one. It may raise anything: the run goes on without it.

    Its constructor takes the run, and as keywords what the configuration gives: `{name: "./mine.py:Mine", key: value}`.

    Attributes:
        library: the module that it needs, of the package named like the tracker; "" for none.
        last: the newest round that it has already, from before this process; only later ones are added.
    """

    library: ClassVar[str] = ""
    last: int = 0

    @abstractmethod
    def add(self, line: Line, at: float) -> None:
        """Add a round: its line of metrics.csv, and when it ended, in seconds since the epoch."""

    @abstractmethod
    def close(self, completed: bool) -> None:
        """End this process's part; `completed`: the run has reached its end."""


def numeric_columns(line: Line) -> dict[str, float]:
    """Returns the columns of a line that have a value, without the round."""
    return {name: float(value) for name, value in line.items() if name != "round" and value != ""}


class TensorBoard(Tracker):
    """Event files in RUN/tensorboard, in single precision, which is what TensorBoard shows.

    Each start writes a new file with all rounds of the run, and empties those of earlier starts: a resumed run has cut
    metrics.csv to the rounds that are done, so no round appears twice. The old files stay: a TensorBoard that is
    watching moves on to the new file from one that has ended, not from one that is gone.
    """

    library = "torch.utils.tensorboard"
    FOLDER = "tensorboard"
    SUFFIX = ".pflmpi"  # of our files, so that others in the folder stay

    def __init__(self, run: TrackedRun) -> None:
        folder = run.folder / self.FOLDER
        for path in folder.glob(f"events.out.tfevents.*{self.SUFFIX}"):
            os.truncate(path, 0)
        # `purge_step` makes a TensorBoard that is watching forget what it has read of the replaced file.
        options: dict[str, Any] = {"purge_step": 0, "flush_secs": 10, "filename_suffix": self.SUFFIX}
        self._writer = import_module(self.library).SummaryWriter(str(folder), **options)

    def add(self, line: Line, at: float) -> None:
        for name, value in numeric_columns(line).items():
            self._writer.add_scalar(name, value, int(line["round"]), at)

    def close(self, completed: bool) -> None:
        self._writer.close()


class WeightsAndBiases(Tracker):
    """A run of Weights & Biases with the id of this one; what a resumed run adds is joined to it by `wandb sync`.

    Args:
        mode: `offline` writes to RUN/wandb, `online` to the server.
    """

    library = "wandb"

    def __init__(self, run: TrackedRun, mode: str = "offline") -> None:
        wandb, folder = import_module(self.library), run.folder / "wandb"
        folder.mkdir(exist_ok=True)
        self._file = folder / "last_round"  # because an offline run cannot be queried
        self.last = int(self._file.read_text()) if self._file.exists() else 0
        self._run = wandb.init(
            project="pflmpi",
            id=run.id,
            name=run.folder.name,
            dir=str(run.folder),
            config=dict(run.options),
            mode=mode,
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )

    def add(self, line: Line, at: float) -> None:
        self._run.log({**numeric_columns(line), "_timestamp": at}, step=int(line["round"]))
        temporary = self._file.with_suffix(".new")
        temporary.write_text(str(line["round"]))
        temporary.replace(self._file)  # atomic: a killed run does not leave a truncated number

    def close(self, completed: bool) -> None:
        self._run.finish(exit_code=0 if completed else 1)


class MLflow(Tracker):
    """A run of MLflow, found again by the id of this one.

    Args:
        store: a folder, which gets the database mlflow.db, or an address such as `http://host:5000`.
    """

    library = "mlflow"
    TAG = "pflmpi.run"
    LONGEST = 500  # characters of a parameter

    def __init__(self, run: TrackedRun, store: str = "mlruns") -> None:
        mlflow = import_module(self.library)
        if "://" not in store:  # a database, because MLflow deprecates plain files
            folder = expand_path(store).absolute()
            folder.mkdir(parents=True, exist_ok=True)
            store = f"sqlite:///{folder / 'mlflow.db'}"
        self._entities, self._client = mlflow.entities, mlflow.MlflowClient(tracking_uri=store)
        experiment = self._client.get_experiment_by_name("pflmpi")
        number = experiment.experiment_id if experiment else self._client.create_experiment("pflmpi")
        earlier = self._client.search_runs([number], filter_string=f"tags.`{self.TAG}` = '{run.id}'")
        if earlier:
            self._id = earlier[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            history = self._client.get_metric_history(self._id, "seconds")
            self.last = max((point.step for point in history), default=0)
        else:
            self._id = self._client.create_run(number, run_name=run.folder.name, tags={self.TAG: run.id}).info.run_id
            options = [self._entities.Param(key, str(value)[: self.LONGEST]) for key, value in run.options.items()]
            self._client.log_batch(self._id, params=options)

    def add(self, line: Line, at: float) -> None:
        round, ended = int(line["round"]), int(1000 * at)
        metrics = [self._entities.Metric(name, value, ended, round) for name, value in numeric_columns(line).items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, completed: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if completed else "KILLED")


class Events(Tracker):
    """RUN/events.jsonl, see `output.events`; written once per round, with the events before it."""

    def __init__(self, run: TrackedRun) -> None:
        self._run, self._pending, self._num_checkpoints = run, list[events_file.Event](), 0
        lines = metrics_file.read(run.folder)
        self.last = int(lines[-1]["round"]) if lines else 0
        is_restart = events_file.drop_torn_line(run.folder) or self.last > 0
        self._note("restart" if is_restart else "start", round=self.last, ranks=run.ranks)
        self._warnings = _Warnings(lambda text: self._note("warning", text=text))
        logging.getLogger("pflmpi").addHandler(self._warnings)
        self._write()

    def add(self, line: Line, at: float) -> None:
        self._note_checkpoints()
        accuracy = float(line["accuracy_mean"] or "nan")
        json_accuracy = None if math.isnan(accuracy) else accuracy
        self._note("round", at, round=int(line["round"]), accuracy_mean=json_accuracy, seconds=float(line["seconds"]))
        self._write()

    def close(self, completed: bool) -> None:
        error = None if completed else sys.exc_info()[1]  # the one that `tracked` handles
        error = error.error if isinstance(error, CollectiveError) else error
        self._note_checkpoints()
        if isinstance(error, TransportError):
            self._note("lost_rank", text=str(error))
        text = None if error is None else first_line(error)
        self._note("end", exit_code=_find_exit_code(error), text=text)
        self._write()
        logging.getLogger("pflmpi").removeHandler(self._warnings)

    def _note(self, event: str, at: float | None = None, **more: Any) -> None:
        self._pending.append({"event": event, "time": round(time() if at is None else at, 3), **more})

    def _note_checkpoints(self) -> None:
        rounds = self._run.checkpoints[self._num_checkpoints :]
        self._num_checkpoints += len(rounds)
        for number in rounds:
            self._note("checkpoint", round=number)

    def _write(self) -> None:
        events, self._pending = self._pending, []
        try:
            events_file.append(self._run.folder, events)
        except OSError:
            logging.getLogger("pflmpi").removeHandler(self._warnings)  # because `tracked` drops this tracker
            raise


def _find_exit_code(error: BaseException | None) -> int:
    if error is None:
        return 0
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return error.exit_code if isinstance(error, PflmpiError) else RunError.exit_code


class _Warnings(logging.Handler):
    """Passes the text of each warning to a function."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        self._note(record.getMessage())


def _check_class(kind: object) -> type[Tracker]:
    if not (isinstance(kind, type) and issubclass(kind, Tracker)):
        raise ConfigError(f"{kind!r} is no subclass of pflmpi.runtime.trackers.Tracker; derive it from that")
    return kind


TRACKERS: Registry[type[Tracker]] = Registry(
    "tracker", {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}, accept=_check_class
)


def check_trackers(output: OutputConfig) -> None:
    """Raise `ConfigError` for an unknown tracker, a missing library, or options that the tracker does not have."""
    for name, options in output.named_trackers():
        kind = TRACKERS[name]
        try:
            inspect.signature(kind).bind(None, **options)
        except TypeError as error:
            raise ConfigError(f"output.trackers: {name}: {error}; it takes {inspect.signature(kind)}") from error
        try:
            import_module(kind.library or __name__)
        except ImportError as error:
            raise ConfigError(
                f"output.trackers names {name}, which needs the package {name}, which is not installed; "
                f"`pip install {name}` (the extra `{name}`), or leave it out"
            ) from error


@contextmanager
def tracked(run: TrackedRun, output: OutputConfig, observe: Observer) -> Iterator[Observer]:
    """Yield an observer that calls `observe` and adds each round to the trackers, after the rounds that they lack.

    A tracker that raises is dropped with a warning.
    """
    working: list[tuple[str, Tracker]] = []

    def attempt(name: str, action: Callable[[], None], tracker: Tracker | None = None) -> None:
        try:
            action()
        except Exception as error:
            working[:] = [pair for pair in working if pair[1] is not tracker]
            why = " ".join(str(error).split()) or type(error).__name__
            more = f"`pflmpi resume {for_shell(run.folder)}` would add the rounds it lacks"
            _log.warning("the tracker %s fails: %s; the run goes on without it, and %s", name, why, more)

    def give(line: Line, at: float) -> None:
        for name, tracker in list(working):
            if int(line["round"]) > tracker.last:
                attempt(name, partial(tracker.add, line, at), tracker)

    def close(completed: bool) -> None:
        for name, tracker in list(working):
            attempt(name, partial(tracker.close, completed), tracker)

    def both(progress: Progress) -> None:
        observe(progress)
        give(progress.columns, time())

    for name, options in output.named_trackers():
        attempt(name, lambda name=name, options=options: working.append((name, TRACKERS[name](run, **options))))  # type: ignore[misc,call-arg]
    if output.events:
        attempt("events", lambda: working.append(("events", Events(run))))
    lines = metrics_file.read(run.folder) if working else []
    times = _estimate_times(run.folder, [float(line["seconds"] or 0) for line in lines])
    for line, at in zip(lines, times, strict=True):
        if line["seconds"]:  # empty in rounds whose metrics were lost
            give(line, at)
    try:
        yield both
    except BaseException:
        close(completed=False)
        raise
    close(completed=True)


def _estimate_times(run: Path, seconds: Sequence[float]) -> list[float]:
    """Returns when rounds of these lengths ended, as if without pauses, the last at the time of metrics.csv."""
    last_end = metrics_file.path(run).stat().st_mtime if seconds else 0.0
    later = list(accumulate(reversed(seconds[1:]), initial=0.0))  # seconds after each round, the last round first
    return [last_end - wait for wait in reversed(later)][: len(seconds)]
