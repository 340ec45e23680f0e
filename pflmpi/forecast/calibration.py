"""Short measurements on this machine, with the configured model, batch size and executor: seconds and memory."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from pflmpi import tree
from pflmpi.forecast.sample import Sample, sample
from pflmpi.forecast.stopwatch import Taken, measure, resident
from pflmpi.runtime.schedule import RoundSchedule
from pflmpi.runtime.setup import Setup

_SHORT = 4.0  # seconds that a longer call should take


@dataclass(frozen=True)
class Plane:
    """What grows with the lanes of a call and the work of each: at + lane m + work (each + both m)."""

    at: float
    lane: float
    each: float
    both: float

    def of(self, lanes: float, work: float) -> float:
        """Return the value for a call with m lanes and so many steps, or samples, in the longest."""
        return self.at + self.lane * lanes + work * (self.each + self.both * lanes)


@dataclass(frozen=True)
class Calibration:
    """What the calls of one cohort take on this machine; where clients are computed one by one, a call has one lane.

    Attributes:
        train, train_memory, train_device: seconds, bytes of the host and of the GPU, by lanes and steps.
        test, test_memory, test_device: the same of a test, by lanes and test samples.
        adapt: seconds of a lane's step where clients adapt before they are tested.
        fold: seconds of a participant's message on its rank.
        serve: seconds of rank 0 in a round, besides.
        fold_memory, serve_memory: bytes that they need on rank 0, besides the messages and the state.
        library: bytes that the first call has brought into memory to stay.
    """

    train: Plane
    train_memory: Plane
    train_device: Plane
    test: Plane
    test_memory: Plane
    test_device: Plane
    adapt: float
    fold: float
    serve: float
    fold_memory: float
    serve_memory: float
    library: float

    def plain(self) -> dict[str, Any]:
        """Return the numbers for a file."""
        return asdict(self)

    @classmethod
    def read(cls, plain: dict[str, Any]) -> "Calibration":
        """Return what `plain` gave; `TypeError`, `ValueError` or `KeyError` for anything else."""
        fields: dict[str, Any] = {
            name: Plane(**value) if isinstance(value, dict) else float(value) for name, value in plain.items()
        }
        return cls(**fields)


def calibrate(ready: Setup, first: RoundSchedule, groups: Sequence[np.ndarray], before: float) -> Calibration:
    """Return what the calls of a cohort take on the device of its data; it takes some seconds.

    Args:
        ready: of the experiment.
        first: its first round.
        groups: clients of the cohort that are computed in one call: one with the fewest, and one with the most of them.
        before: bytes of this process without the data, before anything was computed.
    """
    executor, device = ready.executor, ready.executor.pool.images.device
    members = executor.cohort == executor.cohort[groups[-1][0]]
    samples, tests = int(executor.federation.num_train[members].max()), max(int(ready.num_test[members].max()), 2)
    width, few = min(ready.task.training.batch_size, samples), max(tests // 4, 1)
    wide = sample(ready, groups[-1], 1, width, few)
    measure(wide.train, device)
    measure(wide.test, device)
    library = max(resident() - before - tree.num_bytes(wide.states) - tree.num_bytes(wide.server), 0)

    brief = measure(wide.train, device).seconds
    batches = min(-(-samples // width), max(2, int(_SHORT / max(brief, 1e-6))))
    cases = [
        sample(ready, group, *size, wide.server)
        for group in groups
        for size in ((1, width, few), (batches, width, tests))
    ]
    adapt = 0.0
    if executor.adapts and batches > 1:
        adapt = _adapt(sample(ready, groups[-1], batches, width, few, wide.server), wide)
    fold, serve = _server(wide, first)
    return Calibration(
        *_planes([(len(one.clients), one.steps, measure(one.train, device)) for one in cases]),
        *_planes([(len(one.clients), one.tests, _without(measure(one.test, device), one, adapt)) for one in cases]),
        adapt=adapt,
        fold=fold.seconds,
        serve=serve.seconds,
        fold_memory=fold.memory,
        serve_memory=serve.memory,
        library=library,
    )


def _adapt(long: Sample, short: Sample) -> float:
    """Return the seconds that a step of one lane adds to a test."""
    device = long.ready.executor.pool.images.device
    added = measure(long.test, device).seconds - measure(short.test, device).seconds
    return max(added, 0.0) / (long.steps - short.steps) / len(long.clients)


def _server(wide: Sample, first: RoundSchedule) -> tuple[Taken, Taken]:
    """Return what it takes to fold the messages (seconds of one of them), and to update the server and publish."""
    host = torch.device("cpu")
    participants = first.participants
    ups = wide.repeated(wide.train(), participants)
    folded = wide.fold(ups, participants)
    fold = measure(lambda: wide.fold(ups, participants), host)
    fold = replace(fold, seconds=fold.seconds / len(participants))
    return fold, measure(lambda: wide.serve(folded, participants, first.receivers), host)


def _without(taken: Taken, one: Sample, adapt: float) -> Taken:
    """Return what a test takes without the adapting before it."""
    return replace(taken, seconds=taken.seconds - adapt * one.steps * len(one.clients))


def _planes(points: list[tuple[int, int, Taken]]) -> tuple[Plane, Plane, Plane]:
    """Return seconds, bytes of the host and of the GPU, from lanes, work, and what was taken."""
    seconds = _plane([(lanes, work, taken.seconds) for lanes, work, taken in points])
    memory = _plane([(lanes, work, taken.memory) for lanes, work, taken in points])
    return seconds, memory, _plane([(lanes, work, taken.device) for lanes, work, taken in points])


def _plane(points: list[tuple[int, int, float]]) -> Plane:
    """Return the plane through values at numbers of lanes and amounts of work, the fewest and the most of each.

    >>> _plane([(1, 10, 12.0), (1, 20, 22.0), (3, 10, 34.0), (3, 20, 64.0)])
    Plane(at=1.0, lane=1.0, each=0.0, both=1.0)
    """
    lines = {}
    for lanes in sorted({lanes for lanes, _, _ in points}):
        found = sorted((work, value) for m, work, value in points if m == lanes)
        (first, low), (last, high) = found[0], found[-1]
        slope = max((high - low) / (last - first), 0.0) if last > first else 0.0
        lines[lanes] = max(low - slope * first, 0.0), slope
    fewest, most = min(lines), max(lines)
    (at, each), (far_at, far_each) = lines[fewest], lines[most]
    apart = max(most - fewest, 1)
    lane, both = (far_at - at) / apart, (far_each - each) / apart
    return Plane(at - lane * fewest, lane, each - both * fewest, both)
