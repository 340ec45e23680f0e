"""The scaling experiment that a command line asks for, and its runs that are not measured yet."""

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
from pflmpi.sweep.pending import CellTask, prepare, unless_written
from pflmpi.sweep.runs import SweepOutcome, run_cells


def scaling_of(
    config: Config, numbers: Sequence[int], mode: Mode, repeats: int, rounds: int, cores: int
) -> tuple[Scaling, str]:
    """The experiment, and a remark on what was set for it.

    Args:
        config: of every point, but for what the mode says.
        cores: that the ranks share in packing mode; 0 where they share GPUs.

    Raises:
        ConfigError: it is impossible.
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
    """Raise `ConfigError` for a number of ranks that cannot share the clients or the cores."""
    for ranks in scaling.ranks:
        clients = scaling.clients(ranks)
        if clients is not None and clients < ranks - 1:  # one of the ranks may be the server's
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
    """Numbers of ranks, separated by commas; raise if they do not ascend from 1 or more."""
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise ConfigError(f"--ranks {text!r}: must be whole numbers with commas between them, such as 1,2,4")
    numbers = tuple(int(word) for word in words)
    if numbers[0] < 1 or any(lower >= higher for lower, higher in pairwise(numbers)):
        raise ConfigError(f"--ranks {text!r}: must be at least 1, and each more than the one before, such as 1,2,4")
    return numbers


def _fix_steps(config: Config, values: dict[str, Any]) -> str:
    """Give each client the same local steps on any number of them; a remark if the configuration has not."""
    if config.partition.clients is None:
        raise ConfigError("--mode weak sets the number of clients, and this partition has none; take another one")
    if config.training.steps is not None:
        return ""
    train = load_federation(config).train
    steps = max(round(sum(config.training.num_steps(len(client)) for client in train) / len(train)), 1)
    values["training"] |= {"steps": steps, "epochs": TrainingConfig().epochs}  # one length alone has an effect
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
    held: Sequence[int],
) -> SweepOutcome:
    """Make the runs of some points that are not measured yet, one after the other.

    Args:
        nodes: that a number of ranks is spread over.
        launcher: words that start a run on so many ranks; none if it starts them itself.
        held: descriptors that every run keeps open.
    """

    def record(done: CellTask) -> str:
        assert isinstance(done.cell, ScaleRun)
        return records.record(done.cell, out, nodes(done.cell.ranks), environ)

    tasks = [unless_written(make_task(planned, scaling, out), out) for planned in planned_runs]
    waiting = [planned for planned, task in zip(planned_runs, tasks, strict=True) if task.command]
    for task in tasks:
        if task.command:
            prepare(task, out)
    by_name = {planned.name: planned.ranks for planned in planned_runs}
    outcome = run_cells(tasks, out, lambda task: launcher(by_name[task.cell.name]), [environ], held, record)
    for planned in waiting:
        if planned.name in outcome.failed:
            records.record_failure(planned, out, outcome.failed[planned.name])
    return outcome


def make_task(planned: ScaleRun, scaling: Scaling, out: Path) -> CellTask:
    """The task of a run: nothing, or all rounds; an interrupted measurement starts again."""
    if records.is_measured(planned, out):
        return CellTask(planned, "done", scaling.rounds, scaling.rounds)
    words = ("run", str(planned.config(out)), "--out", str(planned.run(out)), "--ranks", str(planned.ranks), "--quiet")
    return CellTask(planned, "start", 0, scaling.rounds, words)
