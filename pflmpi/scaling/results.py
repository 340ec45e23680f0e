"""What was measured: the runs of a scaling experiment, and its points."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from pflmpi.analysis.metrics import columns
from pflmpi.errors import CheckpointError
from pflmpi.scaling import records
from pflmpi.scaling.experiment import WARM_UP, Scaling, read
from pflmpi.scaling.points import ScaleRun, runs
from pflmpi.store import verify

PARTS = ("compute", "evaluation", "exchange", "waiting", "checkpoint")


@dataclass(frozen=True)
class MeasuredRun:
    """A run that was measured.

    Attributes:
        one: the run.
        record: what else is known of it.
        columns: of its metrics, each [rounds], the first rounds included.
    """

    one: ScaleRun
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

    def measured(self, values: np.ndarray) -> np.ndarray:
        """The rounds that count."""
        return values[WARM_UP:]

    @property
    def seconds(self) -> np.ndarray:
        """Seconds of the rounds that count."""
        return self.measured(self.columns["seconds"])

    @property
    def wire_bytes(self) -> float:
        """Bytes between ranks in a round."""
        both = self.columns["wire_up_bytes"] + self.columns["wire_down_bytes"]
        return float(self.measured(both).mean())


@dataclass(frozen=True)
class Point:
    """All runs on one number of ranks.

    Attributes:
        runs: those that were measured; none where all have failed.
        problems: of the others, by repeat; "" for one that has not been made.
        plan: what was predicted; {} without a prediction.
        same_bits: whether its runs have the digest of the first run with as many clients and threads.
    """

    ranks: int
    threads: int
    clients: int | None
    runs: Sequence[MeasuredRun]
    problems: Mapping[int, str]
    plan: records.Record
    same_bits: bool

    @cached_property
    def seconds(self) -> float:
        """Median over its runs of the median round; NaN without any."""
        return float(np.median([np.median(one.seconds) for one in self.runs])) if self.runs else float("nan")

    @cached_property
    def spread(self) -> tuple[float, float]:
        """Quartiles over all rounds of all runs."""
        if not self.runs:
            return float("nan"), float("nan")
        low, high = np.quantile(np.concatenate([one.seconds for one in self.runs]), [0.25, 0.75]).tolist()
        return low, high

    @cached_property
    def parts(self) -> dict[str, float]:
        """Mean seconds of each part over all rounds."""
        return {
            name: float(np.concatenate([one.measured(one.parts[name]) for one in self.runs]).mean())
            if self.runs
            else float("nan")
            for name in PARTS
        }

    def most(self, column: str) -> float:
        """Highest value of a column of memory; NaN where it is not known."""
        found = max((int(one.columns[column].max()) for one in self.runs), default=0)
        return float(found) if found else float("nan")

    @property
    def wire_bytes(self) -> float:
        """Bytes between ranks in a round."""
        return float(np.mean([one.wire_bytes for one in self.runs])) if self.runs else float("nan")


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
        """Speed-up that would be ideal; where ranks share the same cores there is none to be had."""
        return 1.0 if self.scaling.mode == "packing" else point.ranks / self.measured[0].ranks

    def efficiency(self, point: Point) -> float:
        """Speed-up, of the ideal one."""
        return self.speed_up(point) / self.ideal(point)

    @property
    def problems(self) -> list[str]:
        """What failed, and points with other bits."""
        found = [
            f"{point.ranks} ranks, repeat {repeat}: {why}"
            for point in self.points
            for repeat, why in point.problems.items()
            if why
        ]
        other = [str(point.ranks) for point in self.points if not point.same_bits]
        return found + ([f"OTHER BITS on {', '.join(other)} ranks"] if other else [])


def results(out: Path) -> Results:
    """What was measured in a folder.

    Raises:
        CheckpointError: it holds no scaling experiment, or files of it are damaged.
    """
    scaling = read(out)
    if scaling is None:
        raise CheckpointError(f"{out} holds no scaling experiment; name the --out of `pflmpi scale`")
    found = [_measured(one, out, scaling.rounds) for one in runs(scaling)]
    expected: dict[tuple[int | None, int], str] = {}  # by what decides bits
    for _, run in found:
        if run is not None:
            ranks = run.one.ranks
            expected.setdefault((scaling.clients(ranks), scaling.threads(ranks)), run.record["digest"])
    points = []
    for ranks in scaling.ranks:
        mine = [run for one, run in found if run is not None and one.ranks == ranks]
        key = scaling.clients(ranks), scaling.threads(ranks)
        missing = {
            one.repeat: str(records.read(one.record(out)).get("problem", ""))
            for one, run in found
            if run is None and one.ranks == ranks
        }
        same = all(run.record["digest"] == expected[key] for run in mine)
        plan = records.read(records.plan_file(out, ranks))
        points.append(Point(ranks, key[1], key[0], mine, missing, plan, same))
    return Results(out, scaling, points)


def _measured(one: ScaleRun, out: Path, rounds: int) -> tuple[ScaleRun, MeasuredRun | None]:
    record = records.read(one.record(out))
    if "digest" not in record:
        return one, None
    found = columns(verify.metrics(one.run(out), rounds))
    if len(found["round"]) <= WARM_UP:
        raise CheckpointError(f"{one.run(out)} has lost its rounds; delete {one.record(out)}, and measure it again")
    return one, MeasuredRun(one, record, found)
