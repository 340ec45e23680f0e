"""As many missing cells of the papers' tables as fit into some seconds on a card: several at a time, cheapest first.

    python benchmarks/gpu_tables.py --seconds 500 [--seeds 1] [--jobs 4] [--out sweeps] [--device cuda] [TABLE ...]
    python benchmarks/gpu_tables.py --plan ...    # says what each of them takes, in that order, and starts nothing
    python benchmarks/overview.py --add sweeps    # puts those that are finished into results/

Missing: with a published figure, and not in results/*.csv, once where several tables have it; of a TABLE that is named
all cells that are not there.

As `pflmpi sweep TABLE --budget` does it for one table, in the same folders (OUT/NAME of a table), for all of the papers
together: what a cell costs is known from its finished rounds, or those of cells like it, else estimated by steps x
parameters. Each of the runs at a time gets its part of the GPU's memory. What the time does not suffice for is stopped
after a round, and goes on with the next call.
"""

import argparse
import csv
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pflmpi.commands.sweep import make_environments
from pflmpi.config.load import Config
from pflmpi.errors import PflmpiError
from pflmpi.forecast.budget import Budget, seconds_per_round, work_per_round
from pflmpi.sweep import table as tables
from pflmpi.sweep.lock import lock_sweep_folder
from pflmpi.sweep.pending import CellTask, explain_unfinished, plan_cell, prepare_cell, skip_if_running
from pflmpi.sweep.runs import GRACE, run_cells
from pflmpi.sweep.table import Cell

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class CellOfTable(Cell):
    """A cell among those of several tables; `table` is the folder of its runs."""

    table: str

    @property
    def name(self) -> str:
        return f"{self.table}/{super().name}"

    def run(self, out: Path) -> Path:
        return super().run(out / self.table)


def main() -> int:
    """Run the cells, and say how many are left."""
    began, options = time.monotonic(), _options()
    share = [f"runtime.gpu_memory={1 / options.jobs:.3f}"] if options.device == "cuda" else []
    selected = cells(options.tables, [f"runtime.device={options.device}", *share], options.seeds)
    configs = {cell.name: config for cell, config, _ in selected}
    wanted = {cell.name for cell, _, missing in selected if missing}

    def tasks() -> list[CellTask]:
        return [skip_if_running(plan_cell(cell, config, options.out, 1), options.out) for cell, config, _ in selected]

    def budget(everything: list[CellTask]) -> Budget:
        pairs = [(task, configs[task.cell.name]) for task in everything if task.done > 1 or task.cell.name in wanted]
        work, speeds = work_per_round(pairs, lambda done, of: None), seconds_per_round(everything, options.out)
        to_run = [task for task in everything if task.cell.name in wanted]
        return Budget((options.seconds or 0) / 3600, options.jobs, to_run, work, speeds)

    if options.plan:
        print(plan(budget(tasks())), end="")
        return 0
    with lock_sweep_folder(options.out) as lock:
        planned = budget(tasks())
        ordered = planned.cheapest_first()
        for task in ordered:
            prepare_cell(task, options.out)
        until = began + options.seconds - min(GRACE, options.seconds / 10)

        def problem(task: CellTask) -> str:
            return explain_unfinished(task, configs[task.cell.name], options.out)

        outcome = run_cells(ordered, options.out, lambda _: [], make_environments(options.jobs), [lock], problem, until)
    left = [task for task in tasks() if task.state != "done" and task.cell.name in wanted]
    print(f"{len(wanted)} cells: {len(wanted) - len(left)} done, {len(left)} left, {len(outcome.failed)} failed")
    for name, cause in outcome.failed.items():
        print(f"failed: {name}: {cause}", file=sys.stderr)
    return int(bool(outcome.failed))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="*", metavar="TABLE", help="default: all of the papers")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seconds", type=float, help="stop in this time")
    what.add_argument("--plan", action="store_true", help="only say what each cell takes")
    parser.add_argument("--seeds", type=int, help="of each cell; default: all of its table")
    parser.add_argument("--jobs", type=int, default=4, help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("sweeps"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args()


def plan(budget: Budget) -> str:
    """A line for each run that is to be done, cheapest first: its seconds, the hours up to here, its name.

    The seconds are inf as long as no run in the folder says how long such a cell takes.
    """
    lines, total = [], 0.0
    for task in budget.cheapest_first():
        if task.command:
            total += budget.seconds(task) / budget.jobs
            lines.append(f"{budget.seconds(task):9.0f} s {total / 3600:8.2f} h  {task.cell.name}\n")
    return "".join(lines)


def cells(paths: Sequence[Path], overrides: Sequence[str], seeds: int | None) -> list[tuple[CellOfTable, Config, bool]]:
    """The cells of some tables, each with its configuration and whether it is missing.

    A table with the runs of another one is left out, and a cell that another one has.
    """
    chosen, known = [], set()
    for path in paths or sorted((ROOT / "configs" / "papers").glob("*/*.yaml")):
        table = tables.load(path)
        if not table.runs_of:
            published = {(row, column) for row, columns in table.published.items() for column in columns}
            count, finished = min(seeds or len(table.seeds), len(table.seeds)), _seeds_in_results(path.stem)
            for cell, config in tables.load_cells(path, overrides, count, []):
                place, settings = (cell.row, cell.column), json.dumps(cell.raw, sort_keys=True)
                if paths or (place in published and settings not in known):
                    known.add(settings)
                    missing = cell.seed not in table.seeds[: finished.get(place, 0)]
                    chosen.append((CellOfTable(**vars(cell), table=path.stem), config, missing))
    return chosen


def _seeds_in_results(name: str) -> dict[tuple[str, str], int]:
    path = ROOT / "results" / f"{name}.csv"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return {(line["row"], line["column"]): int(line["seeds_finished"]) for line in csv.DictReader(text.splitlines())}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PflmpiError as error:
        sys.exit(f"gpu_tables: {error}")
