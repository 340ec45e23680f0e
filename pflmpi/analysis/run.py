"""A run on disk, opened for reading: its configuration, metrics and checkpoints. Needs neither torch nor MPI."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from pflmpi.errors import CheckpointError
from pflmpi.learning.early_stop import EarlyStop
from pflmpi.learning.main_measure import MainMeasure, main_measure
from pflmpi.store import run_folder, verify
from pflmpi.store.partition_file import SampleCounts
from pflmpi.store.verify import Metrics, explain_not_a_run
from pflmpi.text import format_ranges, short_name

if TYPE_CHECKING:  # these need torch or an extra
    import pandas
    import xarray
    from torch import nn

    from pflmpi.analysis.personal_module import ClientSamples
    from pflmpi.config.load import Config
    from pflmpi.data.unseen import Division
    from pflmpi.experiment.build import Experiment


@dataclass(frozen=True)
class Fork:
    """Where a run branched off its parent."""

    run: str  # id of the parent
    round: int  # the last round that both have
    changes: tuple[str, ...]  # dotted keys of the configuration that differ from the parent's


@dataclass(frozen=True, eq=False)
class Run:
    """A run, finished or in progress; its folder may be a copy. Made by `open_run`.

    Whatever uses metrics.csv raises `CheckpointError` if it is damaged; see `verified_metrics`.

    Attributes:
        path: the folder; `open_run` makes it absolute.
        config: the resolved configuration, nested, including the section `recorded` that the run adds.
        name: the name of the algorithm, for legends; not unique.
        config_notes: parts of config.yaml that the newest checkpoint does not confirm, one line each.
        shown_path: the folder as it was named, for tables.
        sections: what `samples`, `model` and `fork` change in the configuration, as in `Config.replace`.
    """

    path: Path
    config: dict[str, Any]
    name: str
    config_notes: tuple[str, ...] = ()
    shown_path: str = ""
    sections: Mapping[str, Any] = field(default_factory=dict)
    _metrics: dict[tuple[str, int], np.ndarray | None] = field(default_factory=dict, init=False)
    _intact: set[int] = field(default_factory=set, init=False)  # rounds whose files were all intact
    _experiments: dict[bool, "Experiment"] = field(default_factory=dict, init=False)  # by whether code may have changed

    @property
    def rounds(self) -> list[int]:
        """The rounds that have a checkpoint, ascending; read from the folder each time."""
        return run_folder.rounds(self.path)

    @property
    def recorded(self) -> dict[str, Any]:
        """The section `recorded` of the configuration: hashes of data, partition and code, versions."""
        recorded: dict[str, Any] = self.config.get("recorded", {})
        return recorded

    @property
    def forked_from(self) -> Fork | None:
        """Where this run branched off its parent; None if it is no fork."""
        try:
            origin = self.recorded["fork"]
            return Fork(str(origin["run"]), int(origin["round"]), tuple(map(str, origin["changes"])))
        except (KeyError, TypeError, ValueError):
            return None

    def shared_rounds(self, other: "Run") -> int:
        """Number of first rounds that this run shares with `other`; 0 unless it is a fork of `other`.

        Raises:
            CheckpointError: the metrics of either run are damaged.
        """
        fork = self.forked_from
        if fork is None or fork.run != other.recorded.get("run"):
            return 0
        texts = [run.verified_metrics.texts[: fork.round] for run in (self, other)]
        return fork.round if texts[0] == texts[1] else 0

    @property
    def stopped_early(self) -> str:
        """Why `training.stop` ended the run before its last round; "" if it did not."""
        training = self.config.get("training", {})
        try:
            return EarlyStop.of(training, self.verified_metrics.lines).why if training.get("stop") else ""
        except (ValueError, AttributeError):
            return ""  # written by a newer version

    @cached_property
    def verified_metrics(self) -> Metrics:
        """The verified lines of metrics.csv, read at the first use.

        Raises:
            CheckpointError: see `verify.metrics`.
        """
        return verify.metrics(self.path, stored.last_round(self.config))

    @property
    def text_notes(self) -> list[str]:
        """Parts of config.yaml and metrics.csv that no checkpoint confirms, one line each."""
        return [*self.config_notes, *self.verified_metrics.notes]

    @property
    def notes(self) -> list[str]:
        """The `text_notes`, and a note if the newest values of clients are from an older round than the metrics."""
        measure = self.main_measure
        values, number = self.newest_metric(measure.of_clients)
        evaluated = self.columns["round"][~np.isnan(self.columns.get(measure.column, np.nan))]
        notes = self.text_notes
        if values is not None and len(evaluated) and number != evaluated[-1]:
            notes.append(f"values of clients are those of round {number}")
        return notes

    @cached_property
    def columns(self) -> dict[str, np.ndarray]:
        """The columns of metrics.csv, each [rounds], read at the first use."""
        return parse_columns(self.verified_metrics)

    @cached_property
    def counts(self) -> SampleCounts | None:
        """Number of samples of each client and class; None if the run did not record them.

        Raises:
            CheckpointError: partition.csv is not the file that the run wrote.
        """
        return verify.partition(self.path, self.recorded)

    @cached_property
    def main_measure(self) -> MainMeasure:
        """The measure that readers are shown first, and that runs are compared by."""
        return main_measure(self.config, {name for name, values in self.columns.items() if not np.isnan(values).all()})

    def has(self, measure: MainMeasure) -> bool:
        """Whether any round has a value of a measure."""
        return not np.isnan(self.columns.get(measure.column, np.nan)).all()

    def metric(self, name: str, number: int) -> np.ndarray | None:
        """A metric of a checkpoint; None if it has no value or is gone. Cached."""
        if (name, number) not in self._metrics:
            try:
                values = self.round(number).metric(name)
            except CheckpointError:
                if number in self.rounds:
                    raise
                return None  # pruned since rounds were listed
            self._metrics[name, number] = None if values is None or np.isnan(values).all() else values
        return self._metrics[name, number]

    def newest_metric(self, name: str) -> tuple[np.ndarray | None, int | None]:
        """A metric from the newest checkpoint that has a value of it, and its round; None if none has."""
        by_round = ((self.metric(name, number), number) for number in reversed(self.rounds))
        return next((pair for pair in by_round if pair[0] is not None), (None, None))

    def final(self, measure: MainMeasure) -> np.ndarray | None:
        """A measure [N] from the newest checkpoint that has it; NaN for clients without test samples.

        If that checkpoint is older than the newest metrics, `notes` says so.
        """
        return self.newest_metric(measure.of_clients)[0]

    @property
    def figures(self) -> Any:
        """The figures of this run as Altair charts, such as `run.figures.accuracy()`; see `figures.Figures`."""
        return import_module("pflmpi.analysis.figures").Figures([self])  # figures.py imports this file

    def cost_to(self, target: float, metric: str = "accuracy_mean") -> CostTo | None:
        """Rounds, seconds and bytes until a metric first reaches a target; None if it never does, or metrics are lost.

        Args:
            target: a lower bound, or an upper bound for losses and errors; accuracies are shares, such as 0.9.
            metric: a column of metrics.csv.
        """
        return compute_cost_to(self.columns, target, metric)

    @property
    def metrics(self) -> "np.recarray[Any, Any]":
        """`columns` as a record array, a line for each round: `run.metrics.seconds`, `run.metrics[-3:]`."""
        kinds = [(name, array.dtype) for name, array in self.columns.items()]
        return np.rec.fromarrays(list(self.columns.values()), kinds)

    def frame(self) -> "pandas.DataFrame":
        """`columns` as a pandas.DataFrame, a line for each round."""
        import pandas

        return pandas.DataFrame(dict(self.columns))

    def clients_table(self, rounds: Iterable[int] | None = None) -> "pandas.DataFrame":
        """A line for each client and round that has a checkpoint; NaN where a client has no value.

        Always there: `round`, `client`, `participant` (whether it trained), `train_samples`, `test_samples`,
        `up_bytes`, `down_bytes`. If the run has them: `client_name` (in the user's own data); `correct`, `accuracy`,
        `test_loss`, `f1`, `train_loss`; the same with `validation_` (and `validation_samples`) and with `trained_`
        (after local training, before the server answers); `round_seconds` (of the whole round); `diagnostic_...` for
        each diagnostic with a number for each client, such as its cluster.

        Args:
            rounds: None for all.

        Raises:
            UserError: there is no such round; a file is damaged.
        """
        import pandas

        numbers = self._checkpoint_rounds(rounds)
        frames = [pandas.DataFrame(build_client_columns(self.round(number))) for number in numbers]
        return pandas.concat(frames, ignore_index=True)

    def to_xarray(
        self, rounds: Iterable[int] | None = None, leaves: str | Iterable[str] | None = None
    ) -> "xarray.Dataset":
        """The state over rounds as named arrays: `run.to_xarray()["model/head/weight"].sel(client=7, round=[1, 9])`.

        Each leaf of the clients is a variable with dimensions (round, client, ...), named by its path. With several
        models it is "cohort0/..." with (round, cohort0_client, ...). The server's state is "server/..." with
        (round, ...).

        Arrays are lazy: only the selected clients' rows of the selected rounds are read, when values are used. dask is
        not needed.

        Args:
            rounds: rounds with a checkpoint; None for all.
            leaves: paths, such as "model/head/weight"; None for all.

        Raises:
            UserError: there is no such round or leaf. When values are read: a file is damaged, or a leaf has another
                shape than in the first round.
        """
        from pflmpi.analysis import lazy_arrays  # imports xarray

        paths = [leaves] if isinstance(leaves, str) else leaves
        return lazy_arrays.open_dataset(self.round, self._checkpoint_rounds(rounds), paths)

    def _checkpoint_rounds(self, rounds: Iterable[int] | None) -> list[int]:
        """The requested rounds, None for all; raises `CheckpointError` for one without a checkpoint."""
        present = self.rounds
        numbers = present if rounds is None else [as_integer("rounds", number) for number in rounds]
        if not numbers:
            raise CheckpointError(
                f"{self.path}: no rounds to read; it has checkpoints {format_ranges(present) or 'none'}"
            )
        for number in numbers:
            self._check_present(number, present)
        return numbers

    def _check_present(self, number: int, present: Sequence[int]) -> None:
        if number not in present:
            raise CheckpointError(
                f"{self.path} has no checkpoint of round {number}; it has {format_ranges(present) or 'none'}"
            )

    def round(self, number: int | None = None) -> Checkpoint:
        """The checkpoint of a round; None for the newest intact one, with a warning if a newer one is damaged.

        Raises:
            CheckpointError: there is no checkpoint of that round, or its files are damaged or belong to another round
                or run.
        """
        if number is None:
            newest, problems = self.newest()
            if problems:
                warnings.warn(f"round {newest.number} stands for a newer one: {problems[0]}", stacklevel=2)
            return newest
        number = as_integer("round", number)
        self._check_present(number, self.rounds)
        # Missing shards are no error here: the server's state is in the round file.
        if problems := [problem for path, problem in self.problems(number).items() if path.exists()]:
            raise CheckpointError("; ".join(problems))
        return Checkpoint(self.path, number)

    def problems(self, number: int) -> dict[Path, str]:
        """Problems of the files of a round, by path; see `verify.checkpoint`. Intact rounds are checked only once."""
        if number in self._intact:
            return {}
        problems = verify.checkpoint(self.path, number, whole=False)
        if not problems:
            self._intact.add(number)
        return problems

    def samples(self, client: int) -> "ClientSamples":
        """The training and test samples of a client, before normalisation; needs torch and the data.

        Raises:
            UserError: there is no such client; the data or code of the run is missing, or gives other samples.
        """
        from pflmpi.analysis.personal_module import copy_client_samples

        return copy_client_samples(self.path, self._division.everyone, as_integer("client", client))

    def model(self, client: int, round: int | None = None, *, changed_code: bool = False) -> "nn.Module":
        """What a client predicts with after a round (None: the newest), as a torch module for its `samples`.

        It predicts as the client does, whatever the algorithm: it adapts first, or joins models. For a plain
        `torch.nn.Module` to train further, use `pflmpi export`.

        Args:
            changed_code: allow your own Python files to have changed since the run started.

        Raises:
            UserError: there is no such client or round; a file is damaged; data or code is missing, or has changed.
        """
        from pflmpi.analysis.personal_module import build_personal_module
        from pflmpi.runtime.fresh_modes import fresh_modes

        number = as_integer("client", client)
        with fresh_modes():  # a client may adapt by gradient steps
            return build_personal_module(self.round(round), self._experiment(changed_code), number)

    @cached_property
    def _division(self) -> "Division":
        from pflmpi.experiment.restore import reopen_data

        return reopen_data(self.path, self._changed_config)

    @cached_property
    def _changed_config(self) -> "Config":
        from pflmpi.config.keywords import merged
        from pflmpi.experiment import stored_config

        return stored_config.checked_config(self.path, merged(stored_config.values(self.path), self.sections))

    def _experiment(self, changed_code: bool) -> "Experiment":
        import torch

        from pflmpi.experiment.restore import rebuild

        if changed_code not in self._experiments:
            device = torch.device("cpu")
            self._experiments[changed_code] = rebuild(self.path, self._changed_config, device, changed_code)
        return self._experiments[changed_code]

    def fork(
        self,
        out: "str | PathLike[str]",
        *,
        round: int | None = None,
        without_clients: Sequence[int] = (),
        changed_code: bool = False,
        **sections: Any,
    ) -> "Run":
        """Starts a new run from a copy of the state after a round, as `pflmpi fork`; needs torch and the data.

        `pflmpi.run(Config.load(out / "config.yaml"), out=out, resume=True)` continues it.

        Args:
            out: folder of the new run.
            round: None for the newest checkpoint.
            without_clients: ids of clients that no longer train.
            changed_code: allow your own Python files to have changed since the run started.
            sections: changes, as in `Config.replace`: `training={"lr": 0.01}`.

        Raises:
            UserError: no such round, a damaged one, a value that cannot change, or a folder that cannot be written.
        """
        from pflmpi.config.keywords import merged
        from pflmpi.experiment import fork, stored_config
        from pflmpi.runtime.fresh_modes import fresh_modes

        folder, number = as_path("out", out), self.round(round).number
        changed = merged(merged(stored_config.values(self.path), self.sections), sections)
        values = fork.without_clients(changed, without_clients)
        with fresh_modes():  # for the trials of own code
            fork.fork(self.path, folder, number, values, changed_code=changed_code)
        return open_run(folder)

    def newest(self) -> tuple[Checkpoint, list[str]]:
        """The newest intact checkpoint, and the problems of newer ones.

        Raises:
            CheckpointError: there is none.
        """
        problems: list[str] = []
        for number in reversed(self.rounds):
            round_problems = self.problems(number)
            if not round_problems:
                return Checkpoint(self.path, number), problems
            problems += round_problems.values()
        why = "; ".join(dict.fromkeys(problems)) or "none has been written yet"
        raise CheckpointError(f"{self.path} has no good checkpoint: {why}")

    def __repr__(self) -> str:
        return f"Run({self.shown_path!r}: {self.name}, checkpoints {format_ranges(self.rounds) or 'none'})"


def open_run(path: str | PathLike[str], **sections: Any) -> Run:
    """Opens the run in a folder.

    Args:
        sections: what has another place now, for `samples`, `model` and `fork`, as in `Config.replace`:
            `data={"path": "moved.npz"}`.

    Raises:
        CheckpointError: the folder is no run, its configuration cannot be read, or a newer pflmpi wrote it.
    """
    run = read_run(path)
    # the working directory of a notebook may change
    return replace(run, path=run.path.absolute(), sections=sections)


def read_run(path: str | PathLike[str]) -> Run:
    """Opens a run as `open_run` does, with its path as it was named: commands print it."""
    folder = as_path("path", path)
    if not folder.is_dir():
        raise CheckpointError(
            explain_not_a_run(folder)
            or f"{folder} is a checkpoint in one file, and no run; `pflmpi inspect` and h5py read it, everything else "
            "needs the folder of the run"
        )
    try:
        regular_file.check_folders(folder)
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}") from error
    config, notes = stored.read_verified(folder)
    section = config.get("algorithm")
    name = section.get("name") if isinstance(section, dict) else None
    return Run(folder, config, short_name(str(name or folder.name)), tuple(notes), str(folder))
