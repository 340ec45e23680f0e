"""Measure a configuration on several numbers of ranks.

pflmpi scale configs/quickstart.yaml --ranks 1,2,4
"""

import argparse
import os
import shlex
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pflmpi import arguments, machine
from pflmpi.cluster import batch_script
from pflmpi.commands.launch import check_alone, num_gpus
from pflmpi.errors import ConfigError, PflmpiError, Stopped, show
from pflmpi.terminal import print_json
from pflmpi.text import printable

if TYPE_CHECKING:
    from pflmpi.config.load import Config
    from pflmpi.scaling.experiment import Scaling
    from pflmpi.scaling.extrapolation import AmdahlFit
    from pflmpi.scaling.results import Point, Results
    from pflmpi.sweep.runs import SweepOutcome

_FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_config(parser)
    parser.add_argument("--ranks", required=True, metavar="R,R,...", help="numbers of ranks, ascending, such as 1,2,4")
    parser.add_argument(
        "--mode",
        choices=("strong", "weak", "packing"),
        default="strong",
        help="strong: the same work (default); weak: clients in proportion to ranks, from those of the configuration "
        "on the first number; packing: the same cores (as threads of ranks) or GPUs for all numbers of ranks",
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each number of ranks (default: 3)")
    parser.add_argument(
        "--rounds", type=int, default=6, metavar="N", help="rounds of each run; the first does not count (default: 6)"
    )
    arguments.add_out(parser, "folder (default: scaling/NAME-MODE)")
    arguments.add_extrapolation(parser)
    arguments.add_json(parser)
    parser.add_argument("--submit", action="store_true", help="submit each number of ranks as a Slurm job of its own")
    parser.add_argument(
        "--mpi",
        choices=("none", "pmix", "pmi2"),
        default="none",
        help="in Slurm jobs, what srun connects ranks with, as for submit (default: none, torch.distributed)",
    )
    parser.add_argument("--setup", type=Path, metavar="FILE", help="with --submit: shell commands that jobs run first")
    parser.add_argument("--dry-run", action="store_true", help="with --submit: print the batch scripts, submit nothing")
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)  # the ranks of the point that a job is for
    parser.epilog = "inside a Slurm job each run is a step of it"
    batch_script.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    check_alone("scale")
    if options.submit and options.to is not None:
        raise ConfigError("--to with --submit, which ends before anything is measured; give it to `pflmpi report DIR`")
    if options.submit and options.json:
        raise ConfigError("--json with --submit, which ends before anything is measured; leave it out")
    if options.submit:
        return _submit(options)
    sbatch_options = {f"--{name}": value for name, value in batch_script.collect_options(options).items()}
    others = {"--": options.sbatch, "--setup": options.setup, "--dry-run": options.dry_run}
    for name, value in {**sbatch_options, **others}.items():
        if value:
            raise ConfigError(f"{name} is for --submit, which is not given; leave it out")
    return _measure(options)


def _measure(options: argparse.Namespace) -> int:
    from pflmpi.config.load import load
    from pflmpi.scaling import experiment, slurm
    from pflmpi.scaling.experiment import folder, runs
    from pflmpi.scaling.extrapolation import check
    from pflmpi.scaling.running import measure
    from pflmpi.sweep.lock import lock_cell, lock_sweep_folder

    config, only = load(options.config, options.overrides), options.only
    on_gpus, job = bool(num_gpus(config.runtime)), slurm.allocation(os.environ, options.mpi)
    scaling, out = _request_experiment(options, config, on_gpus, None if job else len(machine.cores()))
    if options.to is not None:
        check(scaling.mode, scaling.ranks, options.to)
    if job:
        for ranks in scaling.ranks if only is None else (only,):
            job.check(scaling.cores, ranks)
    planned_runs = [planned for planned in runs(scaling) if only in (None, planned.ranks)]
    with ExitStack() as stack:
        locks = [stack.enter_context(lock_sweep_folder(out, shared=only is not None))]
        if only is None:
            experiment.write(scaling, out)
        else:
            locks.append(stack.enter_context(lock_cell(folder(out, only))))
        launcher = partial(job.launcher, scaling.cores) if job else lambda _: ()
        nodes = partial(job.nodes_of, scaling.cores) if job else lambda _: 1
        outcome = measure(planned_runs, scaling, out, nodes, launcher, os.environ, locks)
    return _conclude(out, outcome, only is None, options.to, options.json)


def _conclude(out: Path, outcome: "SweepOutcome", whole: bool, to: int | None, as_json: bool) -> int:
    """Show the results, and write them unless this is the job of one point (not `whole`); return the exit code."""
    from pflmpi.scaling.extrapolation import fit, summary
    from pflmpi.scaling.page import PAGE, write_page
    from pflmpi.scaling.results import read_results, write_table

    measured = read_results(out)
    no_law = "" if to is None else _explain_no_law(measured, outcome)
    reach = None if no_law else to
    files: list[Path] = []
    if whole:
        write_table(measured)
        files.append(out / "scale.csv")
    if whole and measured.measured:
        write_page([measured], out, reach)
        files.append(out / PAGE)
    law = None if reach is None else fit(measured, reach)
    if as_json:
        print_json({**_experiment(measured), "files": files, "extrapolation": _extrapolation(law, reach)})
    else:
        _show(measured)
        for path in files:
            print(path)
        if law is not None and reach is not None:
            print(summary(law, reach, measured.measured[-1].ranks))
    if no_law:
        show(PflmpiError(f"no extrapolation to {to} ranks: {no_law}"))
    if outcome.signal:
        show(PflmpiError("stopped; the same command goes on from here"))
        return outcome.exit_code_of_signal
    if outcome.stopped:
        return Stopped.exit_code
    return _FAILED if outcome.failed or measured.problems else 0


def _explain_no_law(measured: "Results", outcome: "SweepOutcome") -> str:
    """Why no law is fitted to what was measured; "" if one is."""
    from pflmpi.scaling.extrapolation import LEAST_POINTS

    if (points := len(measured.measured)) < LEAST_POINTS:
        return f"it needs {LEAST_POINTS} measured numbers of ranks, and there are {points}"
    return "the measurement was stopped" if outcome.signal else ""


def _experiment(measured: "Results") -> dict[str, Any]:
    """The points of an experiment for JSON; missing measurements are null."""
    scaling = measured.scaling
    return {
        "out": measured.out,
        "mode": scaling.mode,
        "repeats": scaling.repeats,
        "rounds": scaling.rounds,
        "points": [_point(measured, point) for point in measured.points],
        "problems": measured.problems,
        "notes": measured.notes,
    }


def _point(measured: "Results", point: "Point") -> dict[str, Any]:
    return {
        "ranks": point.ranks,
        "threads": point.threads,
        "clients": point.clients,
        "runs": len(point.runs),
        **measured.measures(point),
        "same_bits": point.same_bits if point.runs else None,
    }


def _extrapolation(law: "AmdahlFit | None", to: int | None) -> dict[str, Any] | None:
    """The fitted law for JSON, each value with its 95 % interval."""
    if law is None or to is None:
        return None
    values: dict[str, Any] = {"ranks": to}
    for name, estimate in (("serial_fraction", law.serial), ("seconds", law.seconds(to))):
        values |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    return values


def _show(measured: "Results") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from pflmpi.scaling.experiment import WARM_UP
    from pflmpi.scaling.records import hardware
    from pflmpi.scaling.results import TITLES, format_table
    from pflmpi.terminal import console

    mode, rounds = measured.scaling.mode, measured.scaling.rounds - WARM_UP
    columns, rows = format_table(measured)
    terminal = console(highlight=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right")
    for point, row in zip(measured.points, rows, strict=True):
        table.add_row(*row, style=None if point.same_bits else "bold red")
    figures = f"medians of {rounds} rounds, the first left out, quartiles of those of all runs"
    terminal.print(f"{mode}: {TITLES[mode]}; {figures}; seconds, bytes of memory")
    terminal.print(table)
    for note in measured.notes:
        terminal.print(note, soft_wrap=True)
    for record in {hardware(run.record): run.record for point in measured.measured for run in point.runs}.values():
        terminal.print(f"{hardware(record)}; pflmpi {record['pflmpi']} {record['commit']}, torch {record['torch']}")
    for problem in measured.problems:
        show(PflmpiError(problem))


def _submit(options: argparse.Namespace) -> int:
    from pflmpi.cluster import submission
    from pflmpi.cluster.jobs import query_queue
    from pflmpi.config.load import load
    from pflmpi.scaling import experiment, slurm
    from pflmpi.scaling.experiment import folder

    given, others = batch_script.effective_options(options, os.environ), options.sbatch
    slurm.check(given, options.setup)
    arguments.check_config(options.config)
    config = load(options.config, options.overrides)
    scaling, out = _request_experiment(options, config, slurm.asks_for_gpus(given, others), None)
    jobs = slurm.jobs(scaling, out, _words(options, scaling, out), given, others, options.mpi, options.setup)
    if options.dry_run:
        print("\n".join(batch_script.format_script(job) for job in jobs.values()), end="")
        return 0
    submission.refuse_without_slurm()
    experiment.write(scaling, out)
    queued = query_queue(os.environ)
    for ranks in scaling.ranks:
        if ranks not in jobs:
            print(f"ranks {ranks}: measured")
        elif job := submission.find_queued_job(folder(out, ranks), queued):
            print(f"ranks {ranks}: job {job.id} {job.never_starts or f'is {job.state} already'}")
        else:
            submission.make_folders(*batch_script.log_folders(jobs[ranks].options), folder(out, ranks))
            number = submission.submit(jobs[ranks], folder(out, ranks), os.environ)
            log = submission.format_log_path(jobs[ranks].options, number)
            print(printable(f"ranks {ranks}: job {number}, log {log}"), flush=True)
    report = f"pflmpi report {shlex.quote(str(out))}"
    later = f"when they have ended: {report}; the same command submits what has failed again"
    print(later if jobs else f"all is measured: {report}")
    return 0


def _words(options: argparse.Namespace, scaling: "Scaling", out: Path) -> list[str]:
    """The command line of the job of a point, without its `--only`."""
    words = ["scale", str(options.config), *arguments.words_of_overrides(options), "--mpi", options.mpi]
    words += ["--ranks", ",".join(map(str, scaling.ranks)), "--mode", scaling.mode, "--out", str(out)]
    return [*words, "--repeats", str(scaling.repeats), "--rounds", str(scaling.rounds)]


def _request_experiment(
    options: argparse.Namespace, config: "Config", on_gpus: bool, cores: int | None
) -> "tuple[Scaling, Path]":
    """The experiment that the options ask for, joined with the one in its folder, and the folder.

    Args:
        cores: of this machine; None in a Slurm job, which has as many as the largest point has ranks.
    """
    from pflmpi.cluster.submission import refuse_transport
    from pflmpi.scaling import experiment, running

    if cores is None:
        refuse_transport(config, options.mpi)
    elif config.runtime.transport == "mpi":
        raise ConfigError("runtime.transport = 'mpi', and processes of one machine use torch.distributed; set auto")
    numbers = running.parse_ranks(options.ranks)
    shared = 0 if on_gpus else cores or numbers[-1]
    new, remark = running.scaling_of(config, numbers, options.mode, options.repeats, options.rounds, shared)
    out = options.out or Path("scaling") / f"{options.config.stem}-{options.mode}"
    scaling = experiment.join(new, out)
    running.check_points(scaling)
    if remark and options.only is None:
        print(remark, file=sys.stderr if options.json else sys.stdout)
    return scaling, out
