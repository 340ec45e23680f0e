"""The trackers that a configuration asks for, while a run goes on: none of them can stop it."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from time import time

from pflmpi.errors import ConfigError
from pflmpi.runtime.config import OutputConfig
from pflmpi.runtime.progress import Observer, Progress
from pflmpi.runtime.trackers.base import Tracked, Tracker
from pflmpi.runtime.trackers.mlflow_store import MLflow
from pflmpi.runtime.trackers.tensorboard import TensorBoard
from pflmpi.runtime.trackers.weights_and_biases import WeightsAndBiases
from pflmpi.store import metrics_file
from pflmpi.text import for_shell

_LIBRARIES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
_log = logging.getLogger(__name__)


def check_installed(output: OutputConfig) -> None:
    """Raise `ConfigError` if the library of a tracker is missing."""
    for name in _wanted(output):
        try:
            import_module(_LIBRARIES[name])
        except ImportError as error:
            value = "true" if name == "tensorboard" else getattr(output, name)
            off = "false" if name == "tensorboard" else "null"
            raise ConfigError(
                f"output.{name} = {value} needs the package {name}, which is not installed; "
                f"`pip install {name}` (the extra `{name}`), or set it to {off}"
            ) from error


@contextmanager
def tracked(run: Tracked, output: OutputConfig, observe: Observer) -> Iterator[Observer]:
    """Yield an observer that calls `observe` and gives each round to the trackers; what they lack they get at once.

    A tracker that raises is left out from then on, with one warning.
    """
    trackers = _Trackers(run, output)

    def both(progress: Progress) -> None:
        observe(progress)
        line, now = progress.columns, time()
        trackers.each(lambda tracker: tracker.add(line, now) if progress.round > tracker.last else None)

    try:
        yield both
    except BaseException:
        trackers.each(lambda tracker: tracker.close(False))
        raise
    trackers.each(lambda tracker: tracker.close(True))


class _Trackers:
    """Those that work."""

    def __init__(self, run: Tracked, output: OutputConfig) -> None:
        self._working: dict[str, Tracker] = {}
        self._folder = run.folder
        makers: dict[str, Callable[[], Tracker]] = {
            "tensorboard": lambda: TensorBoard(run),
            "wandb": lambda: WeightsAndBiases(run, output.wandb or "offline"),
            "mlflow": lambda: MLflow(run, output.mlflow or ""),
        }
        for name in _wanted(output):
            self._try(name, lambda name=name: self._working.update({name: makers[name]()}))  # type: ignore[misc]
        lines = metrics_file.read(run.folder) if self._working else []
        ended = _times(run.folder, [float(line["seconds"]) for line in lines])
        for line, at in zip(lines, ended, strict=True):
            done = int(line["round"])
            self.each(lambda one, line=line, at=at, done=done: one.add(line, at) if done > one.last else None)  # type: ignore[misc]

    def each(self, action: Callable[[Tracker], None]) -> None:
        """Do something with each that works."""
        for name, tracker in list(self._working.items()):
            self._try(name, lambda tracker=tracker: action(tracker))  # type: ignore[misc]

    def _try(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._working.pop(name, None)
            why = " ".join(str(error).split()) or type(error).__name__
            _log.warning(
                "output.%s fails: %s; the run goes on without it, and `pflmpi resume %s` would add the rounds it lacks",
                name,
                why,
                for_shell(self._folder),
            )


def _wanted(output: OutputConfig) -> list[str]:
    return [name for name in _LIBRARIES if getattr(output, name)]


def _times(run: Path, seconds: Sequence[float]) -> list[float]:
    """When rounds of these lengths ended, without pauses, the last at the time of metrics.csv."""
    ended = metrics_file.path(run).stat().st_mtime if seconds else 0.0
    later = list(accumulate(reversed(seconds[1:]), initial=0.0))  # of each round, the last first
    return [ended - each for each in reversed(later)][: len(seconds)]
