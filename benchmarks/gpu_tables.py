"""As many missing cells of the papers' tables as fit into some seconds on a card: several at a time, cheapest first.

    python benchmarks/gpu_tables.py --seconds 500 [--jobs 4] [--out sweeps] [--device cuda] [TABLE ...]

As `pflmpi sweep TABLE --budget` does it for one table, in the same folders (OUT/NAME of a table), for all of
configs/papers together: what a cell costs is known from its finished rounds, or those of cells like it, else estimated
by steps x parameters. Each of the runs at a time gets its part of the GPU's memory. What the time does not suffice for
is stopped after a round, and goes on with the next call.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pflmpi.commands.sweep import environments
from pflmpi.config.load import Config
from pflmpi.errors import PflmpiError
from pflmpi.forecast.budget import Budget, seconds_per_round, work_per_round
from pflmpi.sweep import table as tables
from pflmpi.sweep.lock import locked
from pflmpi.sweep.pending import CellTask, cell_task, prepare, unfinished, unless_written
from pflmpi.sweep.runs import GRACE, run_cells
from pflmpi.sweep.table import Cell

PAPERS = Path(__file__).resolve().parent.parent / "configs" / "papers"


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
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="*", metavar="TABLE", help="default: all in configs/papers")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--jobs", type=int, default=4, help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("sweeps"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    share = [f"runtime.gpu_memory={1 / options.jobs:.3f}"] if options.device == "cuda" else []
    overrides = [f"runtime.device={options.device}", *share]
    with locked(options.out) as lock:
        selected = cells(options.tables or sorted(PAPERS.rglob("*.yaml")), overrides)
        configs = {cell.name: config for cell, config in selected}

        def tasks() -> list[CellTask]:
            return [unless_written(cell_task(cell, config, options.out, 1), options.out) for cell, config in selected]

        now = tasks()
        pairs = [(task, configs[task.cell.name]) for task in now if task.command]
        work, speeds = work_per_round(pairs, lambda done, of: None), seconds_per_round(now, options.out)
        ordered = Budget(options.seconds / 3600, options.jobs, now, work, speeds).cheapest_first()
        for task in ordered:
            prepare(task, options.out)
        until = began + options.seconds - min(GRACE, options.seconds / 10)

        def problem(task: CellTask) -> str:
            return unfinished(task, configs[task.cell.name], options.out)

        outcome = run_cells(ordered, options.out, lambda _: [], environments(options.jobs), [lock], problem, until)
    left = [task for task in tasks() if task.state != "done"]
    print(f"{len(now)} cells: {len(now) - len(left)} done, {len(left)} left, {len(outcome.failed)} failed")
    for name, cause in outcome.failed.items():
        print(f"failed: {name}: {cause}", file=sys.stderr)
    return int(bool(outcome.failed))


def cells(paths: Sequence[Path], overrides: Sequence[str]) -> list[tuple[CellOfTable, Config]]:
    """The cells of some tables, with their configurations; a table with the runs of another one is left out."""
    found = []
    for path in paths:
        if not tables.load(path).runs_of:
            chosen = tables.selected(path, overrides, None, [])
            found += [(CellOfTable(**vars(cell), table=path.stem), config) for cell, config in chosen]
    return found


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PflmpiError as error:
        sys.exit(f"gpu_tables: {error}")
