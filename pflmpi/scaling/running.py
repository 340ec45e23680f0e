"""Plans the scaling experiment of a command line, and makes its runs that are not measured yet."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from pflmpi.config.load import Config, parse
from pflmpi.errors import ConfigError
from pflmpi.experiment.build import load_federation
from pflmpi.learning.training import TrainingConfig
from pflmpi.scaling import records
from pflmpi.scaling.experiment import WARM_UP, Mode, ScaleRun, Scaling
from pflmpi.sweep.pending import CellTask, prepare_cell, skip_if_running
from pflmpi.sweep.runs import SweepOutcome, run_cells


def scaling_of(
    config: Config, numbers: Sequence[int], mode: Mode, repeats: int, rounds: int, cores: int
) -> tuple[Scaling, str]:
    """Builds the experiment; also a remark for the user if an option was changed, else "".

    Args:
        config: the configuration of every point, before the mode changes it.
        numbers: numbers of ranks, ascending.
        cores: cores that the ranks share in packing mode; 0 if they share GPUs.

    Raises:
        ConfigError: the experiment is impossible.
    """
    if repeats < 1:
        raise ConfigError(f"--repeats {repeats}: must be at least 1")
    if rounds <= WARM_UP:
        raise ConfigError(f"--rounds {rounds}: must be at least {WARM_UP + 1}, because the first round does not count")
    if config.runtime.transport == "inprocess" and numbers[-1] > 1:
        raise ConfigError(f"--ranks {numbers[-1]} with runtime.transport = 'inprocess', which has 1; use auto")
    values = config.resolved()
    remark = _fix_steps(config, values) if mode == "weak" else ""
    return Scaling(mode, tuple(numbers), repeats, rounds, numbers[0], cores if mode == "packing" else 0, values), remark


def check_points(scaling: Scaling) -> None:
    """Raises `ConfigError` for a number of ranks that cannot share the clients or the cores."""
    for ranks in scaling.ranks:
        clients = scaling.clients(ranks)
        if clients is not None and clients < ranks - 1:  # rank 0 may have no clients
            raise ConfigError(
                f"--ranks {ranks}, but there are {clients} clients (partition.clients); give at most {clients + 1}, "
                "one for the server and one for each client"
            )
        if scaling.mode == "weak":
            before = scaling.config["partition"]["clients"]
            if before * ranks % scaling.base:
                raise ConfigError(
                    f"--ranks {ranks} in weak mode: {before} clients on {scaling.base} ranks are {before * ranks}/"
                    f"{scaling.base} on {ranks}, no whole number; choose another number of ranks or of clients"
                )
        if scaling.cores and ranks > scaling.cores:
            raise ConfigError(
                f"--ranks {ranks} in packing mode, and {scaling.cores} cores to share; give at most {scaling.cores}"
            )
        parse(scaling.raw(ranks))


def parse_ranks(text: str) -> tuple[int, ...]:
    """Parses numbers of ranks separated by commas; raises `ConfigError` unless they ascend from 1 or more."""
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise ConfigError(f"--ranks {text!r}: must be whole numbers with commas between them, such as 1,2,4")
    numbers = tuple(int(word) for word in words)
    if numbers[0] < 1 or any(lower >= higher for lower, higher in pairwise(numbers)):
        raise ConfigError(f"--ranks {text!r}: must be at least 1, and each more than the one before, such as 1,2,4")
    return numbers


def _fix_steps(config: Config, values: dict[str, Any]) -> str:
    """Sets the local steps of each client, so that they do not depend on the number of clients; returns a remark."""
    if config.partition.clients is None:
        raise ConfigError("--mode weak sets the number of clients, and this partition has none; take another one")
    if config.training.steps is not None:
        return ""
    train = load_federation(config).train
    steps = max(round(sum(config.training.num_steps(len(client)) for client in train) / len(train)), 1)
    values["training"] |= {
        "steps": steps,
        "epochs": TrainingConfig().epochs,
    }  # other epochs beside steps are refused
    return (
        f"training.steps = {steps}, the mean of the clients: with epochs, more clients would have less to do each, "
        "because they share the samples"
    )


def measure(
    planned_runs: Sequence[ScaleRun],
    scaling: Scaling,
    out: Path,
    nodes: Callable[[int], int],
    launcher: Callable[[int], Sequence[str]],
    environ: Mapping[str, str],
    locks: Sequence[int],
) -> SweepOutcome:
    """Makes those of the runs that are not measured yet, one after the other.

    Args:
        nodes: number of nodes for a number of ranks.
        launcher: the command that starts a run on a number of ranks; empty if the run starts its ranks itself.
        locks: file descriptors of locks that every run keeps open.
    """

    def record(task: CellTask) -> str:
        assert isinstance(task.cell, ScaleRun)
        return records.record(task.cell, out, nodes(task.cell.ranks), environ)

    tasks = [skip_if_running(make_task(planned, scaling, out), out) for planned in planned_runs]
    for task in tasks:
        if task.command:
            prepare_cell(task, out)
    ranks_of = {planned.name: planned.ranks for planned in planned_runs}
    outcome = run_cells(tasks, out, lambda task: launcher(ranks_of[task.cell.name]), [environ], locks, record)
    for planned, task in zip(planned_runs, tasks, strict=True):
        if task.command and planned.name in outcome.failed:
            records.record_failure(planned, out, outcome.failed[planned.name])
    return outcome


def make_task(planned: ScaleRun, scaling: Scaling, out: Path) -> CellTask:
    """The task of a run: all rounds, or none if it is measured; an interrupted measurement starts again."""
    if records.is_measured(planned, out):
        return CellTask(planned, "done", scaling.rounds, scaling.rounds)
    words = ("run", str(planned.config(out)), "--out", str(planned.run(out)), "--ranks", str(planned.ranks), "--quiet")
    problem = "its measurement was not finished" if planned.run(out).exists() else ""
    return CellTask(planned, "start", 0, scaling.rounds, words, problem)
