"""Write a Slurm batch script and submit it."""

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from pflmpi import arguments
from pflmpi.cluster.batch_script import add_arguments as add_sbatch_arguments
from pflmpi.errors import CheckpointError, ConfigError, RunError, Stopped
from pflmpi.terminal import print_surely
from pflmpi.text import printable, some

if TYPE_CHECKING:
    from pflmpi.cluster.batch_script import BatchScript
    from pflmpi.config.load import Config

_FAILED = 1  # some cells of a sweep
_WARNING = "USR1@120"  # to the ranks, seconds before the time limit: for a round and a checkpoint


class Pending(NamedTuple):
    """What a job has still to do.

    Attributes:
        out: the folder of the run or sweep.
        words: the command line of `pflmpi`.
        config: of the run; None for a sweep.
        cells: how many a sweep has; 0 for a run.
        todo: the numbers of the cells that are not done, with the folders of their runs.
    """

    out: Path
    words: list[str]
    config: "Config | None" = None
    cells: int = 0
    todo: Mapping[int, Path] = MappingProxyType({})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Registers the command-line arguments besides the options of sbatch."""
    arguments.add_overrides(parser)
    arguments.add_cells(parser)
    arguments.add_failed_cells(parser)
    arguments.add_changed_code(parser)
    parser.add_argument("config", type=Path, nargs="?", help="a YAML file; none with --array")
    parser.add_argument("--out", type=arguments.folder, metavar="DIR", help="folder (default: runs/NAME, sweeps/NAME)")
    parser.add_argument("--array", type=Path, metavar="TABLE", help="submit a sweep as a job array, a cell per task")
    parser.add_argument("--jobs", type=int, metavar="N", help="tasks of the array at a time (default: all)")
    pack = "cells that a task of the array runs one after another, within one --time (default: 1)"
    parser.add_argument("--pack", type=int, metavar="N", help=pack)
    parser.add_argument(
        "--mpi",
        choices=("none", "pmix", "pmi2"),
        default="none",
        help="what srun connects ranks with: pmix (Open MPI), pmi2 (MPICH), none (torch.distributed, the default)",
    )
    requeue = "stop before the time limit, requeue the job and resume, until all rounds are done"
    parser.add_argument("--requeue", action="store_true", help=requeue)
    restarts = "start all ranks of a run again from the newest checkpoint when one was lost, up to N times (default: 0)"
    parser.add_argument("--restarts", type=int, default=0, metavar="N", help=restarts)
    setup = "shell commands that the job runs first, such as `module load`; may set `python`, the interpreter"
    parser.add_argument("--setup", type=Path, metavar="FILE", help=setup)
    parser.add_argument("--wait", action="store_true", help="wait for the end, with the exit code of the run")
    parser.add_argument("--test-only", action="store_true", help="say when the job would start, and submit nothing")
    parser.add_argument("--dry-run", action="store_true", help="print the batch script, and submit nothing")
    add_sbatch_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Submit a run, or a sweep as a job array, if it is not done; return the exit code."""
    pending = pending_work(options)
    if pending is None:
        return 0
    if options.dry_run or options.test_only:
        _preview(options, pending)
        return 0
    number, log = submit(options, pending)
    what = f", {len(pending.todo)} of {pending.cells} cells" if pending.cells else ""
    print_surely(f"job {number}: {pending.out}{what}")
    print(f"log: {log}")
    print(f"watch: pflmpi status {number}    or: tail -F {'*'.join(map(shlex.quote, log.split('*')))}", flush=True)
    return _wait(number, pending) if options.wait else 0


def _preview(options: argparse.Namespace, pending: Pending) -> None:
    """Print the batch script of a job, or when it would start."""
    from pflmpi.cluster.batch_script import log_folder, script
    from pflmpi.cluster.submission import would_start

    job, _ = _with_memory(_job(options, pending), pending.config)
    if options.test_only:
        print(would_start(job, os.environ))
        return
    print(script(job), end="")
    logs = log_folder(job.options)
    if not logs.is_dir():
        print(f"pflmpi: make {logs}/ before you submit this; Slurm would not", file=sys.stderr)


def _wait(number: str, pending: Pending) -> int:
    """Wait for a job, and return the exit code of its run; of an array 0 if all cells are done, 75 or 1."""
    from pflmpi.cluster.jobs import wait
    from pflmpi.cluster.status import one_folder, run_status

    jobs = wait(number, os.environ)
    print("\n".join(map(printable, one_folder(pending.out, os.environ))))
    states = map(run_status, pending.todo.values() or [pending.out])
    if all(state is not None and state.done for state in states):
        return 0
    codes = {job.exit_code or RunError.exit_code for job in jobs if job.state != "COMPLETED"}
    if pending.todo:
        return Stopped.exit_code if codes == {Stopped.exit_code} else _FAILED
    return next(iter(codes), RunError.exit_code)


def pending_work(options: argparse.Namespace) -> Pending | None:
    """What a run or a sweep has still to do; None, and a line on the terminal, if it is done."""
    _check(options)
    return _pending_run(options) if options.array is None else _pending_sweep(options)


def submit(options: argparse.Namespace, pending: Pending) -> tuple[str, str]:
    """Submit a job for what is to do; its id, or the array's, and its log, with `*` for the task of an array."""
    from pflmpi.cluster import batch_script, submission

    job, memory = _with_memory(_job(options, pending), pending.config)
    submission.refuse_second(pending.out, options.sbatch, os.environ)
    submission.make_folders(batch_script.log_folder(job.options), pending.out)
    number = submission.submit(job, pending.out, os.environ, memory)
    return number, submission.log_of(job.options, number)


def _check(options: argparse.Namespace) -> None:
    from pflmpi.cluster.batch_script import check_setup

    if (options.config is None) == (options.array is None):
        raise ConfigError("submit takes a CONFIG, for one run, or --array TABLE, for a sweep; give one of them")
    if options.array is None:
        for name in ("jobs", "pack", "seeds", "only", "failed", "anew"):
            if getattr(options, name) not in (None, [], False):
                raise ConfigError(f"--{name} is for --array TABLE, which is not given; leave it out")
    for name in ("jobs", "pack"):
        if (number := getattr(options, name)) is not None and number < 1:
            raise ConfigError(f"--{name} {number}: must be at least 1")
    if options.restarts < 0:
        raise ConfigError(f"--restarts {options.restarts}: must be at least 0")
    if options.mem == "auto" and options.array is not None:
        raise ConfigError("--mem auto is for one run; give the memory of a node that the largest cell needs")
    check_setup(options.setup)


def _with_memory(job: "BatchScript", config: "Config | None") -> "tuple[BatchScript, int]":
    """The job of a run with the memory that it needs, and the bytes that were counted; see `forecast.job`."""
    if config is None or "mem" not in job.options:
        return job, 0
    from pflmpi.forecast.job import with_memory

    options, counted = with_memory(config, job.options)
    return replace(job, options=options), counted


def _pending_run(options: argparse.Namespace) -> Pending | None:
    """What is still to do of a run; None, and a line on the terminal, if it is done."""
    from pflmpi.cluster.submission import refuse_transport
    from pflmpi.config.load import load
    from pflmpi.sweep.pending import run_state

    arguments.check_config(options.config)
    config = load(options.config, options.overrides)
    refuse_transport(config, options.mpi)
    _show_implied_ranks(options, config)
    out = options.out or Path("runs") / options.config.stem
    need = run_state(out, config, options.changed_code)
    if need.problem:
        raise CheckpointError(need.problem)
    if need.state == "done":
        early = need.done < config.training.rounds
        rounds = (
            f"{out} has stopped early after round {need.done}" if early else f"all {need.done} rounds of {out} are done"
        )
        print(f"{rounds}; nothing to submit")
        return None
    words = [*arguments.words_of_overrides(options), *arguments.words_of_changed_code(options)]
    return Pending(out, ["run", str(options.config), *words, "--out", str(out), "--continue"], config)


def _show_implied_ranks(options: argparse.Namespace, config: "Config") -> None:
    from pflmpi.cluster.batch_script import given, implied_ranks

    if text := implied_ranks(given(options), options.sbatch, config.runtime.threads):
        print(f"pflmpi: {text}; --ntasks says otherwise", file=sys.stderr)


def _pending_sweep(options: argparse.Namespace) -> Pending | None:
    """Cells of a table that are still to do; None, and a line on the terminal, if all are done."""
    from pflmpi.cluster.submission import refuse_transport
    from pflmpi.sweep import table as tables
    from pflmpi.sweep.pending import cell_task, has_failed

    out = tables.folder(options.array, options.out)
    works = {}
    cells = tables.selected(options.array, options.overrides, options.seeds, options.only)
    _show_implied_ranks(options, cells[0][1])
    for number, (cell, config) in enumerate(cells):
        refuse_transport(config, options.mpi)
        work = cell_task(cell, config, out, None, options.changed_code, options.anew)
        if work.state != "done" and (not options.failed or has_failed(cell, out)):
            works[number] = work
    if others := [work for work in works.values() if work.state == "other"]:
        more = f" ({len(others) - 1} more: {some([work.cell.name for work in others[1:]])})" if others[1:] else ""
        raise CheckpointError(f"{others[0].cell.name}: {others[0].problem}; or leave it out with --only{more}")
    if not works:
        why = f"no cell in {out} has failed" if options.failed else f"all {len(cells)} cells in {out} are done"
        print(f"{why}; nothing to submit")
        return None
    todo = {number: work.cell.run(out) for number, work in works.items()}
    words = ["sweep", *arguments.words_of_cells(options.array, out, options), *arguments.words_of_changed_code(options)]
    return Pending(out, [*words, *["--anew"] * options.anew], None, len(cells), todo)


def packed(cells: Sequence[int], size: int) -> list[Sequence[int]]:
    """The cells of each task of an array.

    >>> packed([0, 1, 2, 5, 7], 2)
    [[0, 1], [2, 5], [7]]
    """
    return [cells[first : first + size] for first in range(0, len(cells), size)]


def _job(options: argparse.Namespace, pending: Pending) -> "BatchScript":
    from pflmpi.cluster.batch_script import BatchScript, check_warning, given, merged, tasks

    number = "%j" if options.array is None else "%A_%a"
    ours: dict[str, str | None] = {
        "job-name": (options.config or options.array).stem,
        "chdir": os.getcwd(),
        "output": f"{pending.out}".replace("%", "%%") + f".{number}.log",
        "open-mode": "append",
    }
    packs = packed([*pending.todo], options.pack or 1)
    if packs:
        ours["array"] = tasks([pack[0] for pack in packs], options.jobs)
    if options.requeue:
        ours |= {"requeue": None, "signal": _WARNING}
        if not any(word.startswith("--signal") for word in options.sbatch):
            check_warning(options.time or "", _WARNING)
    return BatchScript(
        options=merged(ours, given(options), options.sbatch),
        python=sys.executable,
        arguments=pending.words,
        mpi=options.mpi,
        others=options.sbatch,
        array=options.array is not None,
        requeue=options.requeue,
        restarts=options.restarts,
        setup=str(options.setup.resolve()) if options.setup else "",
        packs=packs if options.pack else (),
    )
