"""Results of a scaling experiment: its runs and points, scale.csv, and a table to read."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isnan
from pathlib import Path

import numpy as np

from pflmpi import atomic
from pflmpi.analysis.metrics import parse_columns
from pflmpi.errors import CheckpointError
from pflmpi.scaling import records
from pflmpi.scaling.experiment import WARM_UP, ScaleRun, Scaling, read, runs
from pflmpi.store import verify
from pflmpi.text import format_bytes, format_csv

PARTS = ("compute", "evaluation", "exchange", "waiting", "checkpoint")
_MEMORY = ("memory_rank_bytes", "memory_bytes")
_MEASURES = (
    *("seconds", "seconds_low", "seconds_high", *(f"{part}_seconds" for part in PARTS)),
    *(*_MEMORY, "wire_bytes", "speed_up", "ideal_speed_up", "efficiency"),
)


@dataclass(frozen=True)
class MeasuredRun:
    """A measured run."""

    planned: ScaleRun
    record: records.Record  # its hardware, versions and digest
    columns: Mapping[str, np.ndarray]  # columns of its metrics, each [rounds], without the warm-up
    notes: Sequence[str]  # what no checkpoint confirms of its metrics

    @cached_property
    def parts(self) -> dict[str, np.ndarray]:
        """Seconds of each round in parts that add up to the round, `PARTS` -> [rounds].

        Compute (local training), evaluation and waiting for the slowest rank are means over the ranks that compute.
        Checkpoint is how long rank 0 stopped for one. Exchange is the rest: messages, the server's update, reports.
        """
        total, slowest, waiting, evaluation, checkpoint = (
            self.columns[f"{name}seconds"] for name in ("", "compute_", "waiting_", "evaluation_", "checkpoint_")
        )
        return {
            "compute": np.maximum(slowest - waiting - evaluation, 0.0),
            "evaluation": evaluation,
            "exchange": np.maximum(total - slowest - checkpoint, 0.0),
            "waiting": waiting,
            "checkpoint": checkpoint,
        }

    @property
    def seconds(self) -> np.ndarray:
        return self.columns["seconds"]


@dataclass(frozen=True)
class Point:
    """All runs on one number of ranks; seconds, memory and bytes exist only if there are measured `runs`."""

    ranks: int
    threads: int
    clients: int | None
    runs: Sequence[MeasuredRun]  # the measured runs
    problems: Mapping[int, str]  # why other runs failed, by repeat; "" for a run that has not been made
    same_bits: bool  # whether its runs have the same digest as the first run with as many clients and threads

    @cached_property
    def seconds(self) -> float:
        """Median over runs of the median seconds of a round."""
        return float(np.median([np.median(run.seconds) for run in self.runs]))

    @cached_property
    def spread(self) -> tuple[float, float]:
        """Quartiles of the seconds over all rounds of all runs; `seconds` need not lie between them."""
        low, high = np.quantile(np.concatenate([run.seconds for run in self.runs]), [0.25, 0.75]).tolist()
        return low, high

    @cached_property
    def parts(self) -> dict[str, float]:
        """Mean seconds of each part over all rounds."""
        return {name: float(np.concatenate([run.parts[name] for run in self.runs]).mean()) for name in PARTS}

    def most(self, column: str) -> float:
        """Highest value of a column of memory; NaN if it is unknown."""
        return max(int(np.nan_to_num(run.columns[column]).max()) for run in self.runs) or float("nan")

    @property
    def wire_bytes(self) -> float:
        """Mean bytes that all ranks together sent in a round."""
        means = [(run.columns["wire_up_bytes"] + run.columns["wire_down_bytes"]).mean() for run in self.runs]
        return float(np.mean(means))


@dataclass(frozen=True)
class Results:
    """A scaling experiment with its points, in ascending order of ranks."""

    out: Path
    scaling: Scaling
    points: Sequence[Point]

    @property
    def measured(self) -> list[Point]:
        """The points with at least one measured run."""
        return [point for point in self.points if point.runs]

    def speed_up(self, point: Point) -> float:
        """Speed-up over the first measured point, in work per second; in weak mode the work grows with the ranks."""
        first = self.measured[0]
        return first.seconds / point.seconds * (self.ideal(point) if self.scaling.mode == "weak" else 1.0)

    def ideal(self, point: Point) -> float:
        """The ideal speed-up; 1 in packing mode, where ranks share the same cores."""
        return 1.0 if self.scaling.mode == "packing" else point.ranks / self.measured[0].ranks

    def efficiency(self, point: Point) -> float:
        return self.speed_up(point) / self.ideal(point)

    def measures(self, point: Point) -> dict[str, float]:
        """The measurements of a point, named as in scale.csv and `pflmpi scale --json`; NaN if it has no runs."""
        if not point.runs:
            return dict.fromkeys(_MEASURES, float("nan"))
        values = (point.seconds, *point.spread, *point.parts.values(), *map(point.most, _MEMORY), point.wire_bytes)
        compared = self.speed_up(point), self.ideal(point), self.efficiency(point)
        return dict(zip(_MEASURES, (*values, *compared), strict=True))

    @property
    def problems(self) -> list[str]:
        """Failed runs, and points whose digests differ."""
        failures = [
            f"{point.ranks} ranks, repeat {repeat}: {why}"
            for point in self.points
            for repeat, why in point.problems.items()
            if why
        ]
        differing = [str(point.ranks) for point in self.points if not point.same_bits]
        if differing:
            failures.append(f"results differ between ranks or repeats on {', '.join(differing)} ranks")
        return failures

    @property
    def notes(self) -> list[str]:
        """What no checkpoint confirms of the measured runs."""
        return [f"{run.planned.name}: {note}" for point in self.points for run in point.runs for note in run.notes]


def read_results(out: Path) -> Results:
    """Reads the results of the experiment in a folder.

    Raises:
        CheckpointError: it holds no scaling experiment, or its files are damaged.
    """
    scaling = read(out)
    if scaling is None:
        raise CheckpointError(f"{out} holds no scaling experiment; name the --out of `pflmpi scale`")
    measured: dict[int, list[MeasuredRun]] = {ranks: [] for ranks in scaling.ranks}
    problems: dict[int, dict[int, str]] = {ranks: {} for ranks in scaling.ranks}
    digests: dict[tuple[int, int | None], str] = {}  # of the first run by threads and clients, which affect results
    for planned in runs(scaling):
        ranks, record = planned.ranks, records.read(planned.record(out))
        if records.is_measured(planned, out):
            measured[ranks].append(_read_measured_run(planned, out, record, scaling.rounds))
            digests.setdefault((scaling.threads(ranks), scaling.clients(ranks)), record["digest"])
        else:
            problems[ranks][planned.repeat] = str(record.get("problem", ""))
    points = []
    for ranks in scaling.ranks:
        threads, clients = scaling.threads(ranks), scaling.clients(ranks)
        same_bits = all(run.record["digest"] == digests[threads, clients] for run in measured[ranks])
        points.append(Point(ranks, threads, clients, measured[ranks], problems[ranks], same_bits))
    return Results(out, scaling, points)


def _read_measured_run(planned: ScaleRun, out: Path, record: records.Record, rounds: int) -> MeasuredRun:
    metrics = verify.metrics(planned.run(out), rounds)
    columns = parse_columns(metrics)
    if len(columns["round"]) <= WARM_UP:
        raise CheckpointError(
            f"{planned.run(out)} has lost its rounds; delete {planned.record(out)}, and measure it again"
        )
    return MeasuredRun(planned, record, {name: values[WARM_UP:] for name, values in columns.items()}, metrics.notes)


Value = str | int | float
_HARDWARE = ("device", "transport", "nodes", "host", "cpu", "cores", "gpus", "driver")
_VERSIONS = ("pflmpi", "torch", "numpy", "mpi4py", "h5py", "python", "commit", "job")
TITLES = {
    "strong": "the same work on every number of ranks",
    "weak": "clients in proportion to the ranks",
    "packing": "the same cores or GPUs on every number of ranks",
}


def write_table(results: Results) -> None:
    """Writes scale.csv, a line for each run; unknown values are empty."""
    lines = [line for point in results.points for line in _build_csv_lines(results, point)]
    # Lines of measured runs have all columns; those of failed ones only the first.
    header = list(dict.fromkeys(name for line in sorted(lines, key=len, reverse=True) for name in line))
    content = format_csv([header, *([line.get(name, "") for name in header] for line in lines)])
    with atomic.explain_write_error(f"in {results.out}", "copy the experiment elsewhere"):
        atomic.write(results.out / "scale.csv", content.encode())


def format_table(results: Results) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a table for readers, a row for each point."""
    varied = {"weak": ["clients"], "packing": ["threads"], "strong": []}[results.scaling.mode]
    columns = ["ranks", *varied, "seconds per round", "quartiles", "speed-up", "efficiency", *PARTS]
    columns += ["largest rank", "all ranks", "bytes between ranks", "bits"]
    return columns, [_format_row(results, point, varied) for point in results.points]


def _format_row(results: Results, point: Point, varied: list[str]) -> list[str]:
    first = [str(point.ranks), *(str(getattr(point, name)) for name in varied)]
    if not point.runs:
        return [*first, "failed" if any(point.problems.values()) else "not measured", *[""] * (len(PARTS) + 7)]
    low, high = point.spread
    return [
        *first,
        f"{point.seconds:.3f}",
        f"{low:.3f}-{high:.3f}",
        f"{results.speed_up(point):.2f}",
        f"{results.efficiency(point):.2f}",
        *(f"{seconds:.3f}" for seconds in point.parts.values()),
        *map(_format_known_bytes, (*map(point.most, _MEMORY), point.wire_bytes)),
        "same" if point.same_bits else "different",
    ]


def _format_known_bytes(count: float) -> str:
    return "" if isnan(count) else format_bytes(count)


def _build_csv_lines(results: Results, point: Point) -> Iterator[dict[str, Value]]:
    """The lines of a point in scale.csv."""
    by_repeat = {run.planned.repeat: run for run in point.runs}
    for repeat in range(1, results.scaling.repeats + 1):
        run = by_repeat.get(repeat)
        line: dict[str, Value] = {
            "mode": results.scaling.mode,
            "ranks": point.ranks,
            "threads": point.threads,
            "clients": "" if point.clients is None else point.clients,
            "repeat": repeat,
            "rounds": 0 if run is None else len(run.seconds),
            "problem": "" if run else point.problems[repeat] or "not measured",
        }
        if run is not None:
            line |= results.measures(replace(point, runs=[run]))
            line |= {"digest": run.record["digest"], "same_bits": int(point.same_bits)}
            line |= {name: str(run.record.get(name, "")) for name in (*_HARDWARE, *_VERSIONS)}
        yield line
