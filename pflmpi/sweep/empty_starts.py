"""Starts of a cell, in a row, that were stopped before a round was complete: counted in a file beside its run."""

from pathlib import Path

from pflmpi.store import run_folder
from pflmpi.sweep.pending import CellTask

LIMIT = 5  # as of a job with one run, see `cluster.batch_script`


def too_many(task: CellTask, out: Path) -> bool:
    """Count a start that was stopped; whether it was the last of so many that more of them would bring nothing.

    Args:
        task: the cell as it was before that start.
    """
    run = task.cell.run(out)
    count = run.with_name(f".{run.name}.empty")
    if max(run_folder.rounds(run), default=0) > task.done:
        count.unlink(missing_ok=True)
        return False
    with count.open("a") as starts:
        starts.write("x")
    if count.stat().st_size < LIMIT:
        return False
    count.unlink()
    return True
