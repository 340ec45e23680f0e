"""Points measured as processes of this machine, or as steps of the Slurm job that this is in."""

import argparse
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from pflmpi import machine
from pflmpi.commands.ranks.launch import num_gpus
from pflmpi.commands.scale.requested import requested_experiment
from pflmpi.commands.scale.table import show_results
from pflmpi.config.load import load
from pflmpi.errors import PflmpiError, Stopped, show
from pflmpi.scaling import experiment, slurm
from pflmpi.scaling.extrapolation import check, fit, summary
from pflmpi.scaling.page import PAGE, write_page
from pflmpi.scaling.points import folder, runs
from pflmpi.scaling.prediction import Machines
from pflmpi.scaling.results import results
from pflmpi.scaling.running import measure as measure_runs
from pflmpi.scaling.tables import write_tables
from pflmpi.sweep.lock import cell_locked, locked
from pflmpi.sweep.runs import SweepOutcome

_FAILED = 1


def measure(options: argparse.Namespace) -> int:
    """Measure what is not measured yet, here or in the Slurm job that this is in."""
    config, only = load(options.config, options.overrides), options.only
    gpus, job = num_gpus(config.runtime) or 0, slurm.allocation(os.environ, options.mpi)
    scaling, out = requested_experiment(options, config, bool(gpus), None if job else len(machine.cores()))
    if options.to is not None:
        check(scaling.mode, scaling.ranks, options.to)
    if job:
        for ranks in scaling.ranks if only is None else (only,):
            job.check(scaling.cores, ranks)
        nodes_of, transport = partial(job.nodes_of, scaling.cores), "torch" if options.mpi == "none" else "mpi"
        machines = Machines(nodes_of, gpus, transport)
    else:
        machines = Machines(lambda _: 1, gpus, "torch")
    some = [one for one in runs(scaling) if only in (None, one.ranks)]
    with ExitStack() as stack:
        held = [stack.enter_context(locked(out, shared=only is not None))]
        if only is None:
            experiment.write(scaling, out)
        else:
            held.append(stack.enter_context(cell_locked(folder(out, only))))
        launcher = partial(job.launcher, scaling.cores) if job else lambda _: ()
        outcome = measure_runs(some, scaling, out, machines, launcher, os.environ, held)
    return _conclude(out, outcome, only is None, options.to)


def _conclude(out: Path, outcome: SweepOutcome, whole: bool, to: int | None) -> int:
    """Show what was measured, and write it unless other jobs may do so too; the exit code."""
    found = results(out)
    show_results(found)
    if whole:
        write_tables(found)
        print(out / "scale.csv")
    if whole and found.measured:
        write_page([found], out, to)
        print(out / PAGE)
    if to is not None and not outcome.signal:
        print(summary(fit(found, to), to, found.measured[-1].ranks))
    if outcome.signal:
        show(PflmpiError("stopped; the same command goes on from here"))
        return 128 + outcome.signal
    if outcome.stopped:
        return Stopped.exit_code
    return _FAILED if outcome.failed or found.problems else 0
