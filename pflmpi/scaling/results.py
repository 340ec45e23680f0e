"""Results of a scaling experiment: its runs and points, scale.csv, and a table to read."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isnan
from pathlib import Path

import numpy as np

from pflmpi import atomic
from pflmpi.analysis.metrics import columns
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.scaling import records
from pflmpi.scaling.experiment import WARM_UP, ScaleRun, Scaling, read, runs
from pflmpi.store import verify
from pflmpi.text import comma_separated, size

PARTS = ("compute", "evaluation", "exchange", "waiting", "checkpoint")


@dataclass(frozen=True)
class MeasuredRun:
    """A run that was measured.

    Attributes:
        planned: the run as it was to be made.
        record: its hardware, versions and digest.
        columns: of its metrics, each [rounds], of the rounds that count.
    """

    planned: ScaleRun
    record: records.Record
    columns: Mapping[str, np.ndarray]

    @cached_property
    def parts(self) -> dict[str, np.ndarray]:
        """Seconds of each round in parts that add up to it, `PARTS` -> [rounds].

        Of the ranks that compute, on average: training, testing, and waiting for the slowest of them; the time for
        which rank 0 stopped for a checkpoint; and the rest: messages, the server's update and the reports of ranks.
        """
        whole, busiest, waiting, testing, stored = (
            self.columns[f"{name}seconds"] for name in ("", "compute_", "waiting_", "evaluation_", "checkpoint_")
        )
        return {
            "compute": np.maximum(busiest - waiting - testing, 0.0),
            "evaluation": testing,
            "exchange": np.maximum(whole - busiest - stored, 0.0),
            "waiting": waiting,
            "checkpoint": stored,
        }

    @property
    def seconds(self) -> np.ndarray:
        """Seconds of each round."""
        return self.columns["seconds"]

    @property
    def wire_bytes(self) -> float:
        """Bytes between ranks in a round."""
        return float((self.columns["wire_up_bytes"] + self.columns["wire_down_bytes"]).mean())


@dataclass(frozen=True)
class Point:
    """All runs on one number of ranks.

    Attributes:
        runs: those that were measured; none where all have failed.
        problems: of the others, by repeat; "" for one that has not been made.
        same_bits: whether its runs have the digest of the first run with as many clients and threads.
    """

    ranks: int
    threads: int
    clients: int | None
    runs: Sequence[MeasuredRun]
    problems: Mapping[int, str]
    same_bits: bool

    @cached_property
    def seconds(self) -> float:
        """Median over its runs of the median round; NaN without any."""
        return float(np.median([np.median(run.seconds) for run in self.runs])) if self.runs else float("nan")

    @cached_property
    def spread(self) -> tuple[float, float]:
        """Quartiles over all rounds of all runs."""
        if not self.runs:
            return float("nan"), float("nan")
        low, high = np.quantile(np.concatenate([run.seconds for run in self.runs]), [0.25, 0.75]).tolist()
        return low, high

    @cached_property
    def parts(self) -> dict[str, float]:
        """Mean seconds of each part over all rounds."""
        if not self.runs:
            return dict.fromkeys(PARTS, float("nan"))
        return {name: float(np.concatenate([run.parts[name] for run in self.runs]).mean()) for name in PARTS}

    def most(self, column: str) -> float:
        """Highest value of a column of memory; NaN where it is not known."""
        most = max((int(run.columns[column].max()) for run in self.runs), default=0)
        return float(most) if most else float("nan")

    @property
    def wire_bytes(self) -> float:
        """Bytes between ranks in a round."""
        return float(np.mean([run.wire_bytes for run in self.runs])) if self.runs else float("nan")


@dataclass(frozen=True)
class Results:
    """A scaling experiment with its points, in ascending order of ranks."""

    out: Path
    scaling: Scaling
    points: Sequence[Point]

    @property
    def measured(self) -> list[Point]:
        """Points with a run."""
        return [point for point in self.points if point.runs]

    def speed_up(self, point: Point) -> float:
        """Over the first measured point: in work per second, which grows with the clients in weak mode."""
        first = self.measured[0]
        return first.seconds / point.seconds * (self.ideal(point) if self.scaling.mode == "weak" else 1.0)

    def ideal(self, point: Point) -> float:
        """The ideal speed-up; 1 where ranks share the same cores."""
        return 1.0 if self.scaling.mode == "packing" else point.ranks / self.measured[0].ranks

    def efficiency(self, point: Point) -> float:
        """Speed-up over the ideal speed-up."""
        return self.speed_up(point) / self.ideal(point)

    @property
    def problems(self) -> list[str]:
        """Failed runs, and points whose digests differ."""
        failures = [
            f"{point.ranks} ranks, repeat {repeat}: {why}"
            for point in self.points
            for repeat, why in point.problems.items()
            if why
        ]
        other = [str(point.ranks) for point in self.points if not point.same_bits]
        return failures + ([f"results differ between ranks or repeats on {', '.join(other)} ranks"] if other else [])


def results(out: Path) -> Results:
    """What was measured in a folder.

    Raises:
        CheckpointError: it holds no scaling experiment, or files of it are damaged.
    """
    scaling = read(out)
    if scaling is None:
        raise CheckpointError(f"{out} holds no scaling experiment; name the --out of `pflmpi scale`")
    measured: dict[int, list[MeasuredRun]] = {ranks: [] for ranks in scaling.ranks}
    problems: dict[int, dict[int, str]] = {ranks: {} for ranks in scaling.ranks}
    digests: dict[tuple[int, int | None], str] = {}  # by threads and clients, which decide bits
    for planned in runs(scaling):
        ranks, record = planned.ranks, records.read(planned.record(out))
        if "digest" in record:
            measured[ranks].append(MeasuredRun(planned, record, _rounds_that_count(planned, out, scaling.rounds)))
            digests.setdefault((scaling.threads(ranks), scaling.clients(ranks)), record["digest"])
        else:
            problems[ranks][planned.repeat] = str(record.get("problem", ""))
    points = []
    for ranks in scaling.ranks:
        decisive = scaling.threads(ranks), scaling.clients(ranks)
        same = all(run.record["digest"] == digests[decisive] for run in measured[ranks])
        points.append(Point(ranks, *decisive, measured[ranks], problems[ranks], same))
    return Results(out, scaling, points)


def _rounds_that_count(planned: ScaleRun, out: Path, rounds: int) -> dict[str, np.ndarray]:
    metrics = columns(verify.metrics(planned.run(out), rounds))
    if len(metrics["round"]) <= WARM_UP:
        raise CheckpointError(
            f"{planned.run(out)} has lost its rounds; delete {planned.record(out)}, and measure it again"
        )
    return {name: values[WARM_UP:] for name, values in metrics.items()}


Value = str | int | float
_ABOUT = ("device", "transport", "nodes", "host", "cpu", "cores", "gpus", "driver")
_VERSIONS = ("pflmpi", "torch", "numpy", "mpi4py", "h5py", "python", "commit", "job")
TITLES = {
    "strong": "the same work on every number of ranks",
    "weak": "clients in proportion to the ranks",
    "packing": "the same cores or GPUs on every number of ranks",
}


def write_table(results: Results) -> None:
    """Write scale.csv, a line for each run; a column is empty where it has no value."""
    lines = [line for point in results.points for line in _run_lines(results, point)]
    header = list(dict.fromkeys(name for line in sorted(lines, key=len, reverse=True) for name in line))
    content = comma_separated([header, *([line.get(name, "") for name in header] for line in lines)])
    try:
        atomic.write(results.out / "scale.csv", content.encode())
    except OSError as error:
        raise ConfigError(f"cannot write in {results.out}: {error.strerror}; {atomic.remedy(error)}") from error


def readable(results: Results) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a table to read, a row for each point."""
    scaling = results.scaling
    named = {"weak": ["clients"], "packing": ["threads"], "strong": []}[scaling.mode]
    columns = ["ranks", *named, "seconds per round", "quartiles", "speed-up", "efficiency", *PARTS]
    columns += ["largest rank", "all ranks", "bytes between ranks", "bits"]
    return columns, [_row(results, point, named) for point in results.points]


def _row(results: Results, point: Point, named: list[str]) -> list[str]:
    first = [str(point.ranks), *(str(getattr(point, name)) for name in named)]
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
        _bytes(point.most("memory_rank_bytes")),
        _bytes(point.most("memory_bytes")),
        _bytes(point.wire_bytes),
        "same" if point.same_bits else "different",
    ]


def _bytes(count: float) -> str:
    return "" if isnan(count) else size(count)


def _run_lines(results: Results, point: Point) -> Iterator[dict[str, Value]]:
    """The lines of a point in scale.csv."""
    by_repeat = {run.planned.repeat: run for run in point.runs}
    for repeat in range(1, results.scaling.repeats + 1):
        run = by_repeat.get(repeat)
        yield {
            "mode": results.scaling.mode,
            "ranks": point.ranks,
            "threads": point.threads,
            "clients": "" if point.clients is None else point.clients,
            "repeat": repeat,
            "rounds": 0,
            "problem": "" if run else point.problems[repeat] or "not measured",
            **(_measurements(results, point, run) if run else {}),
        }


def _measurements(results: Results, point: Point, run: MeasuredRun) -> dict[str, Value]:
    seconds = float(np.median(run.seconds))
    speed_up = results.speed_up(point) * point.seconds / seconds
    low, high = np.quantile(run.seconds, [0.25, 0.75]).tolist()
    memory = {name: int(run.columns[name].max()) for name in ("memory_rank_bytes", "memory_bytes")}
    return {
        "rounds": len(run.seconds),
        "seconds": seconds,
        "seconds_low": low,
        "seconds_high": high,
        **{f"{name}_seconds": float(run.parts[name].mean()) for name in PARTS},
        **{name: value or "" for name, value in memory.items()},
        "wire_bytes": run.wire_bytes,
        "speed_up": speed_up,
        "ideal_speed_up": results.ideal(point),
        "efficiency": speed_up / results.ideal(point),
        "digest": run.record["digest"],
        "same_bits": int(point.same_bits),
        **{name: str(run.record.get(name, "")) for name in (*_ABOUT, *_VERSIONS)},
    }
