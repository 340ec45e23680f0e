"""Tune every row of a table with as many trials on validation samples, then test the best on fresh seeds.

pflmpi search mine.yaml --budget 27 --jobs 4
"""

import argparse
import glob
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pflmpi import arguments, atomic
from pflmpi.errors import ConfigError, RunError, Stopped
from pflmpi.text import format_csv, format_decimal, short_repr

if TYPE_CHECKING:
    from pflmpi.analysis.table import Entry
    from pflmpi.config.load import Config
    from pflmpi.sweep.search import Trial
    from pflmpi.sweep.table import Cell, SweepTable

_FAILED = 1  # exit code of a sweep
_DIVERGED = "are not finite"  # in the error of a run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", type=Path, metavar="TABLE", help="a YAML file as for sweep, with data.validation")
    parser.add_argument(
        "--budget", type=int, required=True, metavar="N", help="trials of each row and column, the table's own first"
    )
    rungs = "steps: each has three times the rounds of the one before, and a third of its trials (default: 3)"
    parser.add_argument("--rungs", type=int, default=3, metavar="N", help=rungs)
    seed = "seed of the trials; must not be one of the table's, which test the result (default: the lowest other one)"
    parser.add_argument("--seed", type=int, metavar="N", help=seed)
    arguments.add_out(parser, "folder (default: searches/NAME)")
    arguments.add_overrides(parser)
    parser.add_argument("--jobs", type=int, metavar="N", help="runs at a time (default: 1)")
    parser.add_argument("--ranks", type=int, metavar="N", help="processes of each run (default: cores or GPUs, shared)")
    submit = "submit what is left of the next step as a Slurm job array with these options of submit, e.g. '--time=30'"
    parser.add_argument("--submit", metavar="OPTIONS", help=submit)


def run(options: argparse.Namespace) -> int:
    from pflmpi.sweep import search
    from pflmpi.sweep import table as tables

    arguments.check_least(options, budget=1, rungs=1, jobs=1)
    if options.submit is not None and (options.jobs is not None or options.ranks is not None):
        raise ConfigError(
            "--jobs and --ranks are of runs on this machine, and --submit has options of its own; give "
            "--submit='--jobs=... --ntasks=...'"
        )
    table = tables.load(options.table)
    out = options.out or Path("searches") / options.table.stem
    selected, seed = tables.load_cells(options.table, options.overrides, 1, []), _seed(options, table)
    _check_validation(selected)
    candidates = search.draw_trials(table, selected, options.budget, seed, options.overrides)
    results: dict[str, dict[str, Any]] = {}
    for step in range(options.rungs):
        num_trials = search.count_trials(step, options.budget)
        candidates = {key: of_cell[:num_trials] for key, of_cell in candidates.items()}
        trials = {trial.name: trial for of_cell in candidates.values() for trial in of_cell}
        file, runs = out / f"step{step + 1}.yaml", out / "trials"
        search.write_table(search.build_step_table(table, [*trials.values()], step, options.rungs, seed), file)
        print(f"step {step + 1} of {options.rungs}: {len(trials)} trials", flush=True)
        cells = tables.list_cells(tables.load(file), [], None)
        if code := _complete(options, file, runs, cells, trials=True):
            return code
        scores = {cell.row: _score(table, runs, cell) for cell in cells}
        for name, cell in zip(trials, cells, strict=True):
            results[name] = _tried(trials[name], cell, scores[name][1])
        for of_cell in candidates.values():
            of_cell.sort(key=lambda trial: scores[trial.name][0])
        _write(out / "tried.csv", [*results.values()])
        for (row, column), of_cell in candidates.items():
            if math.isnan(scores[of_cell[0].name][1]):
                raise RunError(
                    f"no trial of {row}/{column} has a figure on validation samples ({out / 'tried.csv'}): all have "
                    "diverged, or its metric is not measured; narrow the ranges, or choose another metric"
                )
    best = [of_cell[0] for of_cell in candidates.values()]
    return _test(options, search.build_tuned_table(table, best, options.budget), out)


def _check_validation(selected: "Sequence[tuple[Cell, Config]]") -> None:
    """Raise `ConfigError` for cells without validation samples; data and partitions of the user's own may have some."""
    from pflmpi.experiment.build import load_federation

    checked: list[object] = []
    for cell, config in selected:
        if config.data.validation or (config.data, config.partition) in checked:
            continue
        if not load_federation(config).validation:
            raise ConfigError(f"{cell.row}/{cell.column} has no validation samples; set data.validation, such as 0.1")
        checked.append((config.data, config.partition))


def _seed(options: argparse.Namespace, table: "SweepTable") -> int:
    """The seed of the trials; it must not be one of the seeds that test the best trials."""
    if options.seed is None:
        return next(seed for seed in range(len(table.seeds) + 1) if seed not in table.seeds)
    if options.seed in table.seeds or options.seed < 0:
        raise ConfigError(f"--seed {options.seed}: the search needs one of its own, not of the table ({table.seeds})")
    return int(options.seed)


def _complete(options: argparse.Namespace, file: Path, out: Path, cells: "Sequence[Cell]", trials: bool = False) -> int:
    """Run the unfinished cells of a table, or submit them; return 0 once all are done, else the exit code.

    Args:
        trials: whether the cells are trials. A trial may diverge, which counts as done, and only then may its
            configuration change; it starts anew if it is ahead and was not tested in the last round of its step. The
            cells of the final test start anew if another trial is the best now.
    """
    from pflmpi.analysis.table import find_changes

    def list_left() -> "list[Cell]":
        left = [cell for cell in cells if _is_left(cell, out, not trials)]
        return [cell for cell in left if not (trials and _has_diverged(cell, out) and not find_changes(cell, out))]

    left = list_left()
    if not left:
        return 0
    ahead = [cell for cell in left if _rounds_done(cell, out) > cell.raw["training"]["rounds"]]
    anew = not trials or bool(ahead) or any(_has_diverged(cell, out) for cell in left)
    words = [str(file), "--out", str(out), *["--anew"] * anew]
    if trials and len(left) < len(cells):  # some of the others have more rounds, from a search with a smaller budget
        words += [word for cell in left for word in ("--only", glob.escape(f"{cell.row}/{cell.column}"))]
    if options.submit is not None:
        code = _call(options, "submit", "--array", *words, *arguments.split_words("--submit", options.submit))
        print("the same command goes on once this job has ended", flush=True)
        return code or Stopped.exit_code
    ranks = [] if options.ranks is None else ["--ranks", str(options.ranks)]
    code = _call(options, "sweep", *words, "--jobs", str(options.jobs or 1), *ranks)
    return 0 if code == _FAILED and not list_left() else code


def _call(options: argparse.Namespace, command: str, *words: str) -> int:
    """Run another command of `pflmpi` in this process; return its exit code."""
    from pflmpi.cli import main

    return main([command, *["--debug"] * options.debug, *words])


def _is_left(cell: "Cell", out: Path, tuned: bool = False) -> bool:
    """Whether a run has rounds left.

    Args:
        tuned: whether it is one of the final test: then a run with other settings, or more rounds, counts as left. A
            trial with other settings is refused unless it has diverged; it may have more rounds, from a later step,
            if it was tested in the last round of this one.
    """
    from pflmpi.analysis.table import find_changes
    from pflmpi.learning.early_stop import EarlyStop
    from pflmpi.store import metrics_file

    run, training, done = cell.run(out), cell.raw["training"], _rounds_done(cell, out)
    if done and (changes := find_changes(cell, out)):
        if tuned or _has_diverged(cell, out):
            return True
        if not cell.config(out).exists():
            raise ConfigError(f"{cell.config(out)} is missing; put it back from a copy")
        key, (old, new) = next(iter(changes.items()))
        where = f"{key} = {short_repr(old)} in {cell.config(out)}, {short_repr(new)} in the trial"
        raise ConfigError(f"{run} was made with another configuration: {where}; move it away, or choose another --out")
    lines = metrics_file.read(run)
    last = EarlyStop.of(training, lines).last_round(training["rounds"])
    if tuned or done <= last:
        return done != last
    tested = [any(line[name] for name in line if name.startswith("validation_")) for line in lines[last - 1 : last]]
    return tested == [False]  # without the line, reading the figures explains what is lost


def _rounds_done(cell: "Cell", out: Path) -> int:
    """The round up to which a checkpoint vouches for the metrics of a run."""
    from pflmpi.store import verify

    newest = verify.verify_newest_attributes(cell.run(out))
    return 0 if newest is None else int(newest["round"])


def _has_diverged(cell: "Cell", out: Path) -> bool:
    from pflmpi.cluster.job_log import find_last_error

    return _DIVERGED in find_last_error(cell.log(out))


def _score(table: "SweepTable", out: Path, cell: "Cell") -> tuple[float, float]:
    """Sort key of a trial (lower is better), and its figure on validation samples; inf and NaN if it diverged.

    Only rounds up to those of the current step count, even if the trial has more from a later one.
    """
    from pflmpi.analysis.run import read_run
    from pflmpi.analysis.table import metric_name, metric_of, pick_value
    from pflmpi.learning.main_measure import lower_is_better, to_validation_name

    if _is_left(cell, out):
        return math.inf, math.nan
    rounds, run = cell.raw["training"]["rounds"], read_run(cell.run(out))
    columns, metric = run.columns, table.metric
    measures = {}  # on validation samples, by the names of those on test samples
    for name in columns:
        if (validation := to_validation_name(name)) in columns:
            measures[name] = columns[validation][:rounds]
    if metric in (None, "spread") or metric_of(metric).column not in measures:
        metric = metric_name(run.main_measure)
    value = pick_value(measures, metric, table.figure)
    order = value if lower_is_better(metric_of(metric).column) else -value
    return math.inf if math.isnan(order) else order, value


def _tried(trial: "Trial", cell: "Cell", figure: float) -> dict[str, Any]:
    return {
        "row": trial.row,
        "column": trial.column,
        "trial": trial.number,
        "rounds": cell.raw["training"]["rounds"],
        "validation": "diverged" if math.isnan(figure) else format_decimal(figure, 4),
        "settings": json.dumps(dict(trial.values)),
    }


def _test(options: argparse.Namespace, tuned: "SweepTable", out: Path) -> int:
    """Run the best trial of each cell with the table's seeds; show the table, and whether its rows differ."""
    from pflmpi.analysis.table import compute_entries, fill_in_metric, metric_of
    from pflmpi.sweep import search
    from pflmpi.sweep import table as tables

    file, runs = out / "tuned.yaml", out / "tuned"
    search.write_table(tuned, file)
    cells = tables.list_cells(tables.load(file), [], None)
    if code := _complete(options, file, runs, cells):
        return code
    code = _call(options, "table", str(file), "--out", str(runs), "--write", str(out))
    table = fill_in_metric(tuned, cells, runs)
    lines = _compare_rows(table, compute_entries(table, cells, runs))
    _write(out / "compared.csv", lines)
    _show(lines, metric_of(table.metric).name)
    return code


def _compare_rows(table: "SweepTable", entries: "Sequence[Entry]") -> list[dict[str, Any]]:
    """A line for each cell: mean, spread and interval over seeds, and the paired test against the best row."""
    from pflmpi.analysis.metrics import CONFIDENCE, compute_deviation, compute_margin_of_error, compute_mean
    from pflmpi.analysis.table import metric_of
    from pflmpi.learning.main_measure import lower_is_better

    figures: dict[str, dict[str, Sequence[float]]] = {}
    for entry in entries:
        is_complete = entry.finished == entry.seeds
        figures.setdefault(entry.column, {})[entry.row] = entry.values if is_complete else [math.nan] * entry.seeds
    metric = metric_of(table.metric)
    digits, lower = metric.digits, table.metric == "spread" or metric.lowest or lower_is_better(metric.column)
    lines = []
    for column, rows in figures.items():
        best = best_row(rows, lower)
        for row, values in rows.items():
            several = len(values) > 1
            is_compared = several and best and row != best
            lines.append(
                {
                    "column": column,
                    "row": row,
                    "mean": f"{compute_mean(values):.{digits}f}",
                    "std": f"{compute_deviation(values):.{digits}f}" if several else "",
                    f"interval_{100 * CONFIDENCE:.0f}": f"{compute_margin_of_error(values):.{digits}f}"
                    if several
                    else "",
                    "seeds": len(values),
                    "best": best,
                    "p": f"{paired_test(values, rows[best]):.4f}" if is_compared else "",
                }
            )
    return lines


def best_row(figures: Mapping[str, Sequence[float]], lower: bool) -> str:
    """The row with the best mean over seeds; "" if no row has a figure for every seed.

    >>> best_row({"a": [math.nan, 0.1], "b": [0.2, 0.3], "c": [0.4, 0.2]}, lower=True)
    'b'
    """
    from pflmpi.analysis.metrics import compute_mean

    means = {row: mean for row, values in figures.items() if not math.isnan(mean := compute_mean(values))}
    return (min if lower else max)(means, key=means.__getitem__, default="")


def paired_test(values: Sequence[float], others: Sequence[float]) -> float:
    """Two-sided p-value of the paired t-test of two rows, over the same seeds in the same order.

    >>> round(paired_test([1.0, 2.0, 4.0], [1.5, 3.0, 4.5]), 4)  # t = -4, 2 degrees of freedom
    0.0572
    """
    if len(differences := {value - other for value, other in zip(values, others, strict=True)}) == 1:
        return float(differences == {0.0})  # scipy divides by zero
    stats: Any = import_module("scipy.stats")  # here, because it takes long to import
    with warnings.catch_warnings():  # for differences that are equal but for rounding
        warnings.simplefilter("ignore", RuntimeWarning)
        return float(stats.ttest_rel(values, others).pvalue)


def _show(lines: Sequence[Mapping[str, Any]], metric: str) -> None:
    from rich.table import Table

    from pflmpi.terminal import console

    grid = Table(
        *lines[0], title=f"{metric}; p: paired t-test against the best row of the column", title_justify="left"
    )
    for line in lines:
        grid.add_row(*map(str, line.values()))
    console(highlight=False).print(grid)


def _write(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    with atomic.explain_write_error(path, "choose another --out"):
        atomic.write(path, format_csv([[*lines[0]], *([*line.values()] for line in lines)]).encode())
