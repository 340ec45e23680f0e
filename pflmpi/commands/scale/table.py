"""A scaling experiment on the terminal."""

from rich.box import SIMPLE_HEAD
from rich.table import Table

from pflmpi.errors import PflmpiError, show
from pflmpi.scaling.environment import hardware
from pflmpi.scaling.experiment import WARM_UP
from pflmpi.scaling.results import Results
from pflmpi.scaling.tables import TITLES, readable
from pflmpi.terminal import table_console

_WIDTH = 190  # characters of a line where no terminal says it


def show_results(found: Results) -> None:
    """Print a line for each point, where it was measured, and what is wrong."""
    mode, rounds = found.scaling.mode, found.scaling.rounds - WARM_UP
    columns, rows = readable(found)
    terminal = table_console(_WIDTH, highlight=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right")
    for point, row in zip(found.points, rows, strict=True):
        table.add_row(*row, style=None if point.same_bits else "bold red")
    terminal.print(f"{mode}: {TITLES[mode]}; medians of {rounds} rounds, the first left out; seconds, bytes of memory")
    terminal.print(table)
    for record in {hardware(run.record): run.record for point in found.measured for run in point.runs}.values():
        terminal.print(f"{hardware(record)}; pflmpi {record['pflmpi']} {record['commit']}, torch {record['torch']}")
    for problem in found.problems:
        show(PflmpiError(problem))
