"""The folder of a scaling experiment as it would be after its runs, without running anything."""

import csv
from collections.abc import Callable

import quick_run
from pflmpi.config import load as configuration
from pflmpi.scaling import experiment, records
from pflmpi.scaling.experiment import Scaling, runs
from pflmpi.store import metrics_file

ABOUT = {"device": "x86_64", "transport": "torch", "cpu": "Old Faithful", "cores": "8", "commit": "abc+", "torch": "2"}
ROUNDS = 4
Seconds = Callable[[int], dict[str, float]]  # ranks -> the columns of a round


def scaling(ranks, mode="strong", repeats=2, **sections):
    """An experiment with the quick configuration."""
    config = configuration.parse(quick_run.settings(**sections)).resolved()
    return Scaling(mode, tuple(ranks), repeats, ROUNDS, ranks[0], 8 if mode == "packing" else 0, config)


def ideal(ranks):
    """Eight seconds of work, a quarter of it evaluation, shared evenly."""
    return {"seconds": 8 / ranks, "compute_seconds": 8 / ranks, "evaluation_seconds": 2 / ranks}


def measured(out, study, seconds=ideal, digest=lambda _: "d"):
    """Write the experiment with all its runs; the first round takes ten times as long."""
    experiment.write(study, out)
    for point in runs(study):
        run(out, point, seconds(point.ranks))
        record = {"ranks": point.ranks, "repeat": point.repeat, "digest": digest(point), "pflmpi": "1", **ABOUT}
        records.write(point.record(out), record)
    return out


def run(out, point, columns):
    """Write the metrics of a run."""
    folder = point.run(out)
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(1, ROUNDS + 1):
        line: dict[str, float] = dict.fromkeys(metrics_file.COLUMNS, 0)
        line |= {
            "memory_rank_bytes": 2**20,
            "memory_bytes": point.ranks * 2**20,
            "wire_up_bytes": 100 * (point.ranks - 1),
        }
        line |= {name: value * (10 if number == 1 else 1) for name, value in columns.items()}
        lines.append({**line, "round": number, "participants": 4})
    with open(metrics_file.path(folder), "w", newline="") as file:
        writer = csv.DictWriter(file, metrics_file.COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
