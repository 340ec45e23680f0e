"""Making the runs of a scaling experiment that are not measured yet."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pflmpi.scaling import records
from pflmpi.scaling.experiment import Scaling
from pflmpi.scaling.points import ScaleRun
from pflmpi.scaling.prediction import Machines, predict_points
from pflmpi.sweep.pending import CellTask, prepare, unless_written
from pflmpi.sweep.runs import SweepOutcome, run_cells


def measure(
    some: Sequence[ScaleRun],
    scaling: Scaling,
    out: Path,
    machines: Machines,
    launcher: Callable[[int], Sequence[str]],
    environ: Mapping[str, str],
    held: Sequence[int],
) -> SweepOutcome:
    """Predict the points of some runs, and make the runs one after the other.

    Args:
        launcher: words that start a run on so many ranks; none if it starts them itself.
        held: descriptors that every run keeps open.
    """

    def record(done: CellTask) -> str:
        assert isinstance(done.cell, ScaleRun)
        return records.record(done.cell, out, machines.nodes(done.cell.ranks), environ)

    tasks = [unless_written(task(one, scaling, out), out) for one in some]
    waiting = [one for one, each in zip(some, tasks, strict=True) if each.command]
    for each in tasks:
        if each.command:
            prepare(each, out)
    predict_points(waiting, out, machines)
    by_name = {one.name: one.ranks for one in some}
    outcome = run_cells(tasks, out, lambda each: launcher(by_name[each.cell.name]), [environ], held, record)
    for one in waiting:
        if one.name in outcome.failed:
            records.failed(one, out, outcome.failed[one.name])
    return outcome


def task(one: ScaleRun, scaling: Scaling, out: Path) -> CellTask:
    """What a run still needs: nothing, or all; rounds after an interruption would be another measurement."""
    if records.done(one, out):
        return CellTask(one, "done", scaling.rounds, scaling.rounds)
    words = ("run", str(one.config(out)), "--out", str(one.run(out)), "--ranks", str(one.ranks), "--quiet")
    return CellTask(one, "start", 0, scaling.rounds, words)
