"""What a batch job has still to do: the rounds of one run, or the cells of a table."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from pflmpi.config import load as configuration
from pflmpi.config.load import Config
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.sweep import cells as listing
from pflmpi.sweep.pending import needed, plan
from pflmpi.sweep.selection import chosen


@dataclass(frozen=True)
class Pending:
    """What is still to be done.

    Attributes:
        out: the folder of the run or sweep.
        arguments: for `pflmpi`.
        cells: of a sweep, by their numbers, each cell's folder below `out`.
        todo: the numbers of those that are not done.
    """

    out: Path
    arguments: tuple[str, ...]
    cells: tuple[Path, ...] = ()
    todo: tuple[int, ...] = ()


def one_run(options: argparse.Namespace) -> Pending | None:
    """Return what a run's configuration, validated, has still to do; None, and a word about it, if it is done."""
    config = configuration.load(options.config, options.overrides)
    _check_transport(config, options.mpi)
    out = options.out or Path("runs") / options.config.stem
    need = needed(out, config)
    if need.problem:
        raise CheckpointError(need.problem)
    if need.state == "done":
        print(f"all {need.done} rounds of {out} are done; nothing to submit")
        return None
    words = [word for text in options.overrides for word in ("-s", text)]
    return Pending(out, ("run", str(options.config), *words, "--out", str(out), "--continue"))


def sweep(options: argparse.Namespace) -> Pending | None:
    """Return which cells of a table, all validated, are still to be done; None, and a word about it, if none is."""
    out = listing.folder(options.array, options.out)
    works = []
    for cell, config in chosen(options.array, options.overrides, options.seeds, options.only):
        _check_transport(config, options.mpi)
        works.append(plan(cell, config, out, None))
        if works[-1].state == "other":
            raise CheckpointError(f"{cell.name}: {works[-1].problem}; or leave it out with --only")
    todo = tuple(number for number, work in enumerate(works) if work.state != "done")
    if not todo:
        print(f"all {len(works)} cells in {out} are done; nothing to submit")
        return None
    words = ["sweep", str(options.array), "--out", str(out)]
    words += [] if options.seeds is None else ["--seeds", str(options.seeds)]
    words += [word for pattern in options.only for word in ("--only", pattern)]
    words += [word for text in options.overrides for word in ("-s", text)]
    return Pending(out, tuple(words), tuple(work.cell.run(out).relative_to(out) for work in works), todo)


def _check_transport(config: Config, mpi: str) -> None:
    """Refuse what every rank would refuse, when it is the job's turn."""
    if config.runtime.faults == "continue":
        raise ConfigError(
            "runtime.faults = 'continue', but a batch script by submit starts ranks with srun, which ends all when one "
            "dies; use stop with --requeue, or write a batch script with launch/mpirun --ft"
        )
    if config.runtime.transport == "mpi" and mpi == "none":
        raise ConfigError(
            "runtime.transport = 'mpi', but with --mpi none every rank would be alone; give --mpi pmix (Open MPI) or "
            "--mpi pmi2 (MPICH)"
        )
