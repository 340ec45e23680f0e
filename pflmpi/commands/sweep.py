"""Run the cells of a table that are not done yet.

pflmpi sweep configs/papers/digits.yaml --only 'FedGMH/*' --seeds 1 --dry-run
"""

import argparse
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pflmpi import arguments
from pflmpi.commands.launch import check_alone, check_ranks, default_ranks
from pflmpi.errors import ConfigError, PflmpiError, RunError, Stopped, UserError, show
from pflmpi.terminal import print_json
from pflmpi.text import join_truncated

if TYPE_CHECKING:
    from pflmpi.config.load import Config
    from pflmpi.forecast.budget import Budget
    from pflmpi.sweep.pending import CellTask
    from pflmpi.sweep.runs import SweepOutcome
    from pflmpi.sweep.table import Cell

_FAILED = 1
_CELLS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")  # of --cell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", type=Path, help="a YAML file with rows, columns and seeds")
    arguments.add_overrides(parser)
    arguments.add_out(parser, "folder of the runs (default: sweeps/NAME)")
    arguments.add_cells(parser)
    arguments.add_failed_cells(parser)
    arguments.add_changed_code(parser)
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default: 1)")
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="processes of each run (default: cores or GPUs, shared among the jobs)"
    )
    parser.add_argument("--budget", type=float, metavar="HOURS", help="cheapest runs first, and stop in this time")
    parser.add_argument("--dry-run", action="store_true", help="show what would be done, and start nothing")
    arguments.add_json(parser)
    cell = "only the Nth of these cells, from 0, or several, such as 0-2,5, in turn (a task of a job array)"
    parser.add_argument("--cell", metavar="N", help=cell)
    parser.add_argument(
        "--launcher", default="", metavar="COMMAND", help="start each run with this, such as 'srun --mpi=pmix'"
    )
    parser.add_argument(
        "--python",
        default=sys.executable,
        metavar="PROGRAM",
        help="the interpreter of the runs, such as that in a container which --launcher starts (default: this one)",
    )


def run(options: argparse.Namespace) -> int:
    began = time.monotonic()
    _check(options)
    selected, numbers = _selected(options)
    if options.cell is None or options.json:
        return _run(options, selected, began)
    worst = 0
    for number, cell in zip(numbers, selected, strict=True):
        try:
            code = _run(options, [cell], began, number)
        except UserError as error:  # of this cell alone, such as damage in its folder
            if len(selected) == 1:
                raise
            show(error, options.debug)
            code = error.exit_code
        if code == Stopped.exit_code or code > 128:
            return code  # stopped, so there is no time left for the others
        worst = max(worst, code)
    return worst


def _run(
    options: argparse.Namespace, selected: "Sequence[tuple[Cell, Config]]", began: float, number: int | None = None
) -> int:
    """Run cells; return the exit code. `number` is that of the cell in a task of a job array."""
    from pflmpi.sweep import table as tables
    from pflmpi.sweep.runs import GRACE

    launcher, out = _launcher(options.launcher), tables.find_sweep_folder(options.table, options.out)
    if options.failed:
        selected = _find_failed(options, selected, out)
        if not selected and not options.json:
            return 0
    tasks = partial(_tasks, options, selected, out)
    budget, until = None, None
    if options.budget is not None:
        budget = _budget(options, [*zip(tasks(), (config for _, config in selected), strict=True)], out)
        until = began + 3600 * options.budget - min(GRACE, 360 * options.budget)  # the last seconds to stop runs in
        expected = budget(tasks()).expected(until - time.monotonic())
        print(expected, flush=True, file=sys.stderr if options.json else sys.stdout)
    if options.dry_run:
        plan = _ordered(tasks, budget)
        if options.json:
            cells = {cell.name: cell for cell, _ in selected}
            planned_cells = [_as_json(cells[task.cell.name], task, out, launcher) for task in plan]
            print_json({"table": options.table, "out": out, "cells": planned_cells})
        else:
            _show_plan(plan, launcher)
        return 0
    if options.cell is not None:
        (task,) = tasks()
        print(f"cell {number}: {task.cell.name}: {task.done} of {task.rounds} rounds done", flush=True)
        if task.state == "done":
            return 0
    configs = {cell.name: config for cell, config in selected}
    planned, outcome = _run_cells(options, partial(_ordered, tasks, budget), configs, out, launcher, until)
    if outcome.signal:
        show(PflmpiError("stopped; the same command goes on from here"))
        return outcome.exit_code_of_signal
    rest = "stopped"
    if budget is not None:
        left = [task for task in tasks() if task.command and task.cell.name not in outcome.failed]
        outcome.stopped = [task.cell.name for task in left]
        rest = f"left, {budget(tasks()).needed(left)}"
    _show_outcome(planned, outcome, out, rest)
    words = arguments.words_of_cells(options.table, options.out, options)
    print(f"table: {shlex.join(['pflmpi', 'table', *words])}")
    return _exit_code(options, planned[0], outcome, out)


def _selected(options: argparse.Namespace) -> "tuple[list[tuple[Cell, Config]], list[int]]":
    """The cells chosen by the options, each with its configuration, and their numbers if --cell is given."""
    from pflmpi.cluster.jobs import parse_tasks
    from pflmpi.sweep import table as tables

    selected = tables.load_cells(options.table, options.overrides, options.seeds, options.only)
    if options.cell is None:
        return selected, []
    is_valid = _CELLS.fullmatch(options.cell) is not None
    ranges = [parse_tasks(part) for part in options.cell.split(",")] if is_valid else []
    numbers = [number for cells in ranges for number in cells]
    if not ranges or not all(ranges) or max(numbers) >= len(selected):  # 5-2 is an empty range
        raise ConfigError(
            f"--cell {options.cell}: there are {len(selected)} cells; give 0 to {len(selected) - 1}, "
            "in the order that --dry-run shows, or several, such as 0-2,5"
        )
    return [selected[number] for number in numbers], numbers


def _find_failed(
    options: argparse.Namespace, selected: "Sequence[tuple[Cell, Config]]", out: Path
) -> "list[tuple[Cell, Config]]":
    """The cells that have failed; if there are none, prints so."""
    from pflmpi.sweep.pending import has_failed, is_done_otherwise

    tasks = _tasks(options, selected, out)
    failed = [pair for pair, task in zip(selected, tasks, strict=True) if has_failed(task, out)]
    if not failed and not options.json:
        print(f"no cell in {out} has failed; nothing to run")
        if others := [task.cell.name for task in tasks if is_done_otherwise(task, out)]:
            print(f"done before the table or the data changed: {join_truncated(others)} (for --anew without --failed)")
    return failed


def _tasks(options: argparse.Namespace, selected: "Sequence[tuple[Cell, Config]]", out: Path) -> "list[CellTask]":
    from pflmpi.sweep.pending import plan_cell, skip_if_running
    from pflmpi.transports.detect import detect

    jobs = detect(os.environ).jobs
    tasks = []
    for cell, config in selected:
        ranks = None  # the launcher decides
        if not options.launcher:
            ranks = options.ranks or default_ranks(config.runtime, options.jobs)
        task = plan_cell(cell, config, out, ranks, options.changed_code, options.anew)
        tasks.append(skip_if_running(task, out, jobs))
    return tasks


def _ordered(
    tasks: "Callable[[], list[CellTask]]", budget: "Callable[[Sequence[CellTask]], Budget] | None"
) -> "list[CellTask]":
    """The tasks in the order of the table, or with a budget the cheapest first."""
    return tasks() if budget is None else budget(tasks()).cheapest_first()


def _run_cells(
    options: argparse.Namespace,
    ordered: "Callable[[], list[CellTask]]",
    configs: "Mapping[str, Config]",
    out: Path,
    launcher: list[str],
    until: float | None,
) -> "tuple[list[CellTask], SweepOutcome]":
    """Run the cells with the folder locked; return their state before, and how the runs ended."""
    from pflmpi.sweep.lock import lock_cell, lock_sweep_folder
    from pflmpi.sweep.pending import explain_unfinished, prepare_cell
    from pflmpi.sweep.runs import run_cells

    with ExitStack() as stack:
        locks = [stack.enter_context(lock_sweep_folder(out, shared=options.cell is not None))]
        if options.cell is not None:
            locks.append(stack.enter_context(lock_cell(ordered()[0].cell.run(out))))
        planned = ordered()
        for task in planned:
            prepare_cell(task, out)
        variables = [dict(os.environ)] * options.jobs if launcher else make_environments(options.jobs)

        def problem(task: "CellTask") -> str:
            return explain_unfinished(task, configs[task.cell.name], out)

        return planned, run_cells(planned, out, lambda _: launcher, variables, locks, problem, until, options.python)


def _exit_code(options: argparse.Namespace, task: "CellTask", outcome: "SweepOutcome", out: Path) -> int:
    """The exit code of the sweep; raises `RunError` for a task of an array that was stopped too often in a row.

    Args:
        task: the first cell; with --cell the only one.
    """
    from pflmpi.sweep.pending import MAX_EMPTY_STARTS, count_empty_start

    if outcome.failed:
        return _FAILED
    if options.cell is not None and outcome.stopped and count_empty_start(task, out):
        raise RunError(
            f"{task.cell.name} was stopped {MAX_EMPTY_STARTS} times in a row before a round was complete; give its job "
            "more --time, and submit it again"
        )
    return Stopped.exit_code if outcome.stopped else 0


def _show_outcome(tasks: "Sequence[CellTask]", outcome: "SweepOutcome", out: Path, rest: str) -> None:
    """Print how many runs are done, and the errors of those that failed.

    Args:
        rest: describes the runs that are neither done nor failed.
    """
    num_before = sum(task.state == "done" for task in tasks)
    failed, stopped = outcome.failed, outcome.stopped
    num_done = len(tasks) - len(failed) - len(stopped)
    more = f", {len(stopped)} {rest}; the same command goes on" if stopped else ""
    print(f"{len(tasks)} runs: {num_done} done ({num_before} of them before), {len(failed)} failed{more}")
    logs = {task.cell.name: task.cell.log(out) for task in tasks if task.command}
    for error in dict.fromkeys(failed.values()):
        print(f"failed: {error}", file=sys.stderr)
        for name in (name for name, text in failed.items() if text == error):
            print(f"  {name}  {logs.get(name, '')}".rstrip(), file=sys.stderr)


def _show_plan(tasks: "Sequence[CellTask]", launcher: Sequence[str]) -> None:
    width = max(len(task.cell.name) for task in tasks)
    for task in tasks:
        kept = "anew; the run there is kept: " if task.state == "start" and task.problem else ""
        line = f"{task.cell.name:{width}}  {task.done}/{task.rounds} rounds  {task.state}  {kept}{task.problem}"
        print(line.rstrip())
    if any(task.command[:1] == ("run",) for task in tasks):
        print("commands of the sweep, which first writes the configurations that they name:")
    for task in tasks:
        if task.command:
            print(shlex.join([*launcher, "pflmpi", *task.command]))


def _as_json(cell: "Cell", task: "CellTask", out: Path, launcher: Sequence[str]) -> dict[str, Any]:
    return {
        "cell": cell.name,
        "row": cell.row,
        "column": cell.column,
        "seed": cell.seed,
        "run": cell.run(out),
        "state": task.state,
        "round": task.done,
        "rounds": task.rounds,
        "problem": task.problem or None,
        "command": [*launcher, "pflmpi", *task.command] if task.command else None,
    }


def _check(options: argparse.Namespace) -> None:
    check_alone("a sweep", ", and give the launcher of the runs with --launcher")
    if options.json and not options.dry_run:
        raise ConfigError("--json is for --dry-run, which is not given; `pflmpi table` and `status` follow a sweep")
    arguments.check_least(options, jobs=1)
    check_ranks(options.ranks)
    if options.budget is not None and not 0 < options.budget < float("inf"):
        raise ConfigError(f"--budget {options.budget:g}: must be hours, more than 0")
    if options.budget is not None and options.cell is not None:
        raise ConfigError(f"--budget {options.budget:g} with --cell, a task of a job array; leave one of the two out")
    if options.cell is not None and options.failed:
        raise ConfigError("--failed with --cell, which names what is run; leave --failed out")
    if options.cell is not None and options.jobs > 1:
        raise ConfigError(f"--jobs {options.jobs} with --cell, which is one run at a time; leave --jobs out")
    if options.launcher and options.ranks is not None:
        raise ConfigError(
            f"--ranks {options.ranks} with --launcher {options.launcher!r}, which starts the ranks; "
            "give their number to the launcher, and leave --ranks out"
        )


def _launcher(text: str) -> list[str]:
    """The words of --launcher; raise `ConfigError` if its program is not found."""
    words = arguments.split_words("--launcher", text)
    if words and shutil.which(words[0]) is None:
        raise ConfigError(f"--launcher {text!r}: there is no program {words[0]!r} here; load its module, or mend PATH")
    return words


def _budget(
    options: argparse.Namespace, tasks: "Sequence[tuple[CellTask, Config]]", out: Path
) -> "Callable[[Sequence[CellTask]], Budget]":
    """Make the function that estimates the budget from the state of the cells; counts the work of their rounds now."""
    from pflmpi.commands.progress import bar
    from pflmpi.forecast.budget import Budget, seconds_per_round, work_per_round

    print("counting steps and parameters of the runs", file=sys.stderr, flush=True)
    with bar("counting") as update:
        work = work_per_round(tasks, update)
    return lambda now: Budget(options.budget, options.jobs, now, work, seconds_per_round(now, out))


def make_environments(jobs: int) -> list[dict[str, str]]:
    """The environment of each of `jobs` runs at a time, among which the GPUs are divided."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return [dict(os.environ)] * jobs
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")[:count]
    return [{**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(visible[job % count :: jobs])} for job in range(jobs)]
