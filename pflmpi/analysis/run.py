"""A run on disk, opened to read: its configuration, metrics and checkpoints. Needs neither torch nor MPI."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pflmpi import regular_file
from pflmpi.analysis.checkpoint import Checkpoint
from pflmpi.analysis.clients_table import build_client_columns
from pflmpi.analysis.metrics import CostTo, compute_cost_to, parse_columns
from pflmpi.config import stored
from pflmpi.config.argument_checks import as_integer, as_path
from pflmpi.errors import CheckpointError, UserError
from pflmpi.learning.early_stop import EarlyStop
from pflmpi.learning.main_measure import MainMeasure, main_measure
from pflmpi.store import run_folder, verify
from pflmpi.store.partition_file import SampleCounts
from pflmpi.store.verify import Metrics, elsewhere
from pflmpi.text import format_ranges, short_name

if TYPE_CHECKING:  # which need torch, or an extra
    import pandas
    import xarray
    from torch import nn

    from pflmpi.analysis.personal_module import ClientSamples
    from pflmpi.experiment.build import Experiment

_ONE_FILE = "`pflmpi inspect` and h5py read it, everything else needs the folder of the run"


@dataclass(frozen=True)
class Fork:
    """Where a run left another.

    Attributes:
        run: id of the other.
        round: the last that both have.
        changes: dotted keys of the configuration that differ since.
    """

    run: str
    round: int
    changes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class NewestMetric:
    """A metric as `Run.newest_metric` finds it.

    Attributes:
        values: None where no checkpoint has any.
        round: that of the checkpoint.
        problems: why newer checkpoints could not be read.
    """

    values: np.ndarray | None
    round: int | None
    problems: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Run:
    """A run, finished or in progress, here or copied from elsewhere. Made by `open_run`.

    Attributes:
        path: the folder.
        config: the resolved configuration, nested, with what the run has `recorded`.
        name: a short name for legends, the algorithm's; not unique.
        config_notes: what in the configuration the newest checkpoint does not cover.
    """

    path: Path
    config: dict[str, Any]
    name: str
    config_notes: tuple[str, ...] = ()
    _metrics: dict[tuple[str, int], np.ndarray | str | None] = field(default_factory=dict, init=False)
    _intact: set[int] = field(default_factory=set, init=False)  # rounds whose files were all intact

    @property
    def rounds(self) -> list[int]:
        """The rounds that have a checkpoint now, ascending."""
        return run_folder.rounds(self.path)

    @property
    def recorded(self) -> dict[str, Any]:
        """What the run has added to its configuration: the hashes of data and partition, and versions."""
        recorded: dict[str, Any] = self.config.get("recorded", {})
        return recorded

    @property
    def forked_from(self) -> Fork | None:
        """Where this run left another, of which it is a fork; None if it is none."""
        try:
            origin = self.recorded["fork"]
            return Fork(str(origin["run"]), int(origin["round"]), tuple(map(str, origin["changes"])))
        except (KeyError, TypeError, ValueError):
            return None

    def shared_rounds(self, other: "Run") -> int:
        """The number of rounds of a run that are those of another, which it is a fork of; 0 if it is of none or others.

        Raises:
            CheckpointError: the metrics of one of them are damaged.
        """
        fork = self.forked_from
        if fork is None or fork.run != other.recorded.get("run"):
            return 0
        texts = [run.verified_metrics.texts[: fork.round] for run in (self, other)]
        return fork.round if texts[0] == texts[1] else 0

    @property
    def stopped_early(self) -> str:
        """Why the run has ended before its last round, by `training.stop`; "" if it has not."""
        training = self.config.get("training", {})
        try:
            return EarlyStop.of(training, self.verified_metrics.lines).why if training.get("stop") else ""
        except (ValueError, AttributeError):
            return ""  # of a newer version

    @cached_property
    def verified_metrics(self) -> Metrics:
        """The lines of metrics.csv as they are at the first use, verified.

        Raises:
            CheckpointError: see `verify.metrics`.
        """
        return verify.metrics(self.path, stored.last_round(self.config))

    @property
    def text_notes(self) -> list[str]:
        """What of configuration and metrics no checkpoint covers, one line each; raises as `verified_metrics`."""
        return [*self.config_notes, *self.verified_metrics.notes]

    @property
    def notes(self) -> list[str]:
        """Warnings about what is shown, one line each: `text_notes`, and where clients' values are older than metrics.

        Raises as `verified_metrics`.
        """
        measure = self.main_measure
        newest = self.newest_metric(measure.of_clients)
        evaluated = self.columns["round"][~np.isnan(self.columns.get(measure.column, np.nan))]
        notes = [*self.text_notes, *newest.problems]
        if newest.values is not None and len(evaluated) and newest.round != evaluated[-1]:
            notes.append(f"values of clients are those of round {newest.round}")
        return notes

    @cached_property
    def columns(self) -> dict[str, np.ndarray]:
        """The columns of metrics.csv, each [rounds], as they are at the first use; raises as `verified_metrics`."""
        return parse_columns(self.verified_metrics)

    @cached_property
    def counts(self) -> SampleCounts | None:
        """Samples of each client and class; None where the run has not recorded them.

        Raises:
            CheckpointError: partition.csv is not the one that the run has written.
        """
        return verify.partition(self.path, self.recorded)

    @cached_property
    def main_measure(self) -> MainMeasure:
        """The measure by which the run is compared; raises as `verified_metrics`."""
        return main_measure(self.config, {name for name, values in self.columns.items() if not np.isnan(values).all()})

    def has(self, measure: MainMeasure) -> bool:
        """Whether some round has a value of a measure; raises as `verified_metrics`."""
        return not np.isnan(self.columns.get(measure.column, np.nan)).all()

    def of_clients(self, measure: MainMeasure, number: int) -> np.ndarray | None:
        """A measure [N] of the clients after a round; None where its checkpoint has none, or cannot be read."""
        values = self.metric_or_problem(measure.of_clients, number)
        return None if isinstance(values, str) else values

    def metric_or_problem(self, name: str, number: int) -> np.ndarray | str | None:
        """A metric of a checkpoint, None where it has no value, or why it cannot be read. Read once."""
        if (name, number) not in self._metrics:
            try:
                values = self.round(number).metric(name)
                self._metrics[name, number] = None if values is None or np.isnan(values).all() else values
            except CheckpointError as error:
                self._metrics[name, number] = str(error)
        return self._metrics[name, number]

    def newest_metric(self, name: str) -> "NewestMetric":
        """A metric of the newest checkpoint that can be read and has a value of it."""
        problems = []
        for number in reversed(self.rounds):
            values = self.metric_or_problem(name, number)
            if isinstance(values, str):
                problems.append(values)
            elif values is not None:
                return NewestMetric(values, number, tuple(problems))
        return NewestMetric(None, None, tuple(problems))

    def final(self, measure: MainMeasure) -> np.ndarray | None:
        """`of_clients` by `newest_metric`, NaN for clients without test samples; `notes` name an older round."""
        return self.newest_metric(measure.of_clients).values

    @property
    def figures(self) -> Any:
        """The figures of this run as Altair charts, such as `run.figures.accuracy()`; see `figures.Figures`."""
        return import_module("pflmpi.analysis.figures").Figures([self])  # which imports this file

    def cost_to(self, target: float, metric: str = "accuracy_mean") -> CostTo | None:
        """Rounds, seconds and bytes until a metric first was as good as a target; None if it never was, or is unknown.

        Args:
            target: at least so much, or at most in a column of losses; accuracies are shares, such as 0.9.
            metric: a column of metrics.csv.
        """
        return compute_cost_to(self.columns, target, metric)

    @property
    def metrics(self) -> "np.recarray[Any, Any]":
        """`columns` as a record array, a line for each round: `run.metrics.seconds`, `run.metrics[-3:]`."""
        kinds = [(name, array.dtype) for name, array in self.columns.items()]
        return np.rec.fromarrays(list(self.columns.values()), kinds)

    def frame(self) -> "pandas.DataFrame":
        """`columns` as a pandas.DataFrame, a line for each round; raises as `clients_table`."""
        frame: pandas.DataFrame = needed("pandas", "frame()", "pandas").DataFrame(dict(self.columns))
        return frame

    def clients_table(self, rounds: Iterable[int] | None = None) -> "pandas.DataFrame":
        """A line for each client and round that has a checkpoint; NaN where a client has no value.

        Columns: `round`, `client`, `participant` (whether it trained), `train_samples`, `test_samples`, `up_bytes`,
        `down_bytes`, as far as the run has them `correct`, `accuracy`, `test_loss`, `f1`, `train_loss`, the same with
        `validation_` (and `validation_samples`), with `trained_` (after local training, before the server answers) and
        `round_seconds` (of the whole round), and `diagnostic_...` for each diagnostic with a number for each client,
        such as its cluster.

        Args:
            rounds: None for all.

        Raises:
            UserError: pandas is not installed; there is no such round; a file is damaged.
        """
        pd = needed("pandas", "clients_table()", "pandas")
        numbers = self._checkpoint_rounds(rounds)
        frames = [pd.DataFrame(build_client_columns(self.round(number))) for number in numbers]
        table: pandas.DataFrame = pd.concat(frames, ignore_index=True)
        return table

    def to_xarray(
        self, rounds: Iterable[int] | None = None, leaves: str | Iterable[str] | None = None
    ) -> "xarray.Dataset":
        """The state over rounds as named arrays: `run.to_xarray()["model/head/weight"].sel(client=7, round=[1, 9])`.

        A variable of dimensions (round, client, ...) for each leaf of the clients, by its path; of several models
        "cohort0/..." with (round, cohort0_client, ...). What the server keeps is "server/..." with (round, ...).

        Nothing but the first checkpoint's description is read before values are used, and then, of the clients, the
        chosen rows of the chosen rounds alone. dask is not needed.

        Args:
            rounds: of checkpoints; None for all.
            leaves: paths, such as "model/head/weight"; None for all.

        Raises:
            UserError: xarray is not installed; there is no such round or leaf. When values are read: a file is damaged,
                or a leaf has another shape than in the first of the rounds.
        """
        lazy_arrays = needed("pflmpi.analysis.lazy_arrays", "to_xarray()", "xarray")
        paths = [leaves] if isinstance(leaves, str) else leaves
        arrays: xarray.Dataset = lazy_arrays.open_dataset(self.round, self._checkpoint_rounds(rounds), paths)
        return arrays

    def _checkpoint_rounds(self, rounds: Iterable[int] | None) -> list[int]:
        """The rounds that are asked for, None for all; raises `CheckpointError` where one has no checkpoint."""
        numbers = self.rounds if rounds is None else [as_integer("rounds", number) for number in rounds]
        if not numbers:
            raise CheckpointError(
                f"{self.path}: no rounds to read; it has checkpoints {format_ranges(self.rounds) or 'none'}"
            )
        for number in set(numbers).difference(self.rounds):
            raise CheckpointError(
                f"{self.path} has no checkpoint of round {number}; it has {format_ranges(self.rounds)}"
            )
        return numbers

    def round(self, number: int | None = None) -> Checkpoint:
        """The checkpoint of a round; None for the newest whose files are all there, with a warning if that is an older.

        Raises:
            CheckpointError: there is none of that round, or its files are damaged or another round's or run's.
        """
        if number is None:
            newest, problems = self.newest()
            if problems:
                warnings.warn(f"round {newest.number} stands for a newer one: {problems[0]}", stacklevel=2)
            return newest
        if (number := as_integer("round", number)) not in (rounds := self.rounds):
            raise CheckpointError(
                f"{self.path} has no checkpoint of round {number}; it has {format_ranges(rounds) or 'none'}"
            )
        if problems := [problem for path, problem in self.problems(number).items() if path.exists()]:
            raise CheckpointError("; ".join(problems))  # of a round file without its shards, the server is there
        return Checkpoint(self.path, number)

    def problems(self, number: int) -> dict[Path, str]:
        """Problems of the files of a round, by path; see `verify.checkpoint`. An intact round is checked once."""
        if number in self._intact:
            return {}
        problems = verify.checkpoint(self.path, number, whole=False)
        if not problems:
            self._intact.add(number)
        return problems

    def samples(self, client: int) -> "ClientSamples":
        """The training and test samples of a client, as the dataset has them; needs torch and the data.

        Raises:
            UserError: there is no such client; the data or code of the run is missing, or has changed.
        """
        from pflmpi.analysis.personal_module import copy_client_samples

        return copy_client_samples(self.path, self._experiment.division.everyone, as_integer("client", client))

    def model(self, client: int, round: int | None = None) -> "nn.Module":
        """What a client predicts with after a round (None: the newest), as a torch module for its `samples`.

        It does what the client does, whatever the algorithm: adapt first, or join models. A `torch.nn.Module` to be
        trained further elsewhere comes from `pflmpi export`.

        Raises:
            UserError: there is no such client or round; a file is damaged; data or code is missing, or has changed.
        """
        from pflmpi.analysis.personal_module import build_personal_module

        return build_personal_module(self.round(round), self._experiment, as_integer("client", client))

    @cached_property
    def _experiment(self) -> "Experiment":
        import torch

        from pflmpi.experiment.restore import reopened

        return reopened(self.path, (), torch.device("cpu"))

    def fork(
        self,
        out: "str | PathLike[str]",
        *,
        round: int | None = None,
        without_clients: Sequence[int] = (),
        changed_code: bool = False,
        **sections: Any,
    ) -> "Run":
        """A new run that begins with a copy of the state after a round, as `pflmpi fork`; needs torch and the data.

        `pflmpi.run(Config.load(out / "config.yaml"), out=out, resume=True)` goes on with it.

        Args:
            out: folder of the new run.
            round: None for the newest checkpoint.
            without_clients: ids of clients that do not train any more.
            changed_code: also where your own Python files have changed since the run started.
            sections: changes, as of `Config.replace`: `training={"lr": 0.01}`.

        Raises:
            UserError: no such round, a damaged one, a value that cannot change, or a folder that cannot be written.
        """
        from pflmpi.config.keywords import merged
        from pflmpi.experiment import fork, stored_config

        folder, number = as_path("out", out), self.round(round).number
        values = fork.without_clients(merged(stored_config.values(self.path), sections), without_clients)
        fork.fork(self.path, folder, number, values, changed_code=changed_code)
        return open_run(folder)

    def newest(self) -> tuple[Checkpoint, list[str]]:
        """The newest checkpoint whose files are all there, and what is wrong with newer ones.

        Raises:
            CheckpointError: there is none.
        """
        problems: list[str] = []
        for number in reversed(self.rounds):
            if not (of_round := self.problems(number)):
                return Checkpoint(self.path, number), problems
            problems += of_round.values()
        why = "; ".join(dict.fromkeys(problems)) or "none has been written yet"
        raise CheckpointError(f"{self.path} has no good checkpoint: {why}")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}: {self.name}, checkpoints {format_ranges(self.rounds) or 'none'})"


def open_run(path: str | PathLike[str]) -> Run:
    """The run in a folder.

    Raises:
        CheckpointError: the folder is no run, its configuration cannot be read, or a newer pflmpi wrote it.
    """
    folder = as_path("path", path)
    if not folder.is_dir():
        raise CheckpointError(elsewhere(folder) or f"{folder} is a checkpoint in one file, and no run; {_ONE_FILE}")
    try:
        regular_file.check_folders(folder)
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}") from error
    config, notes = stored.verified(folder)
    section = config.get("algorithm")
    name = section.get("name") if isinstance(section, dict) else None
    return Run(folder, config, short_name(str(name or folder.name)), tuple(notes))


def needed(module: str, what: str, library: str) -> Any:
    """A module that needs a library of the extra `analysis`; raises `UserError` where that is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(
            f"{what} needs {library}, which is not installed ({error}); `pip install 'pflmpi[analysis]'` brings it"
        ) from error
