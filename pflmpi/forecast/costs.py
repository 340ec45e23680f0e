"""Cost of groups of clients, from the cost of a few measured calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pflmpi.forecast.measuring import Cost
from pflmpi.messages.groups import ClientGroup
from pflmpi.runtime.setup import Setup


@dataclass(frozen=True)
class Plane:
    """Value that grows with the lanes m of a call and the work of each: at + lane m + work (each + both m)."""

    at: float
    lane: float
    each: float
    both: float

    @classmethod
    def through(cls, points: Sequence[tuple[float, float, float]]) -> "Plane":
        """Plane through lanes, work and value of some calls.

        >>> plane = Plane.through([(1, 10, 12.0), (1, 20, 22.0), (3, 10, 34.0), (3, 20, 64.0)])
        >>> round(plane.of(2, 10), 3), round(plane.of(3, 40), 3)
        (23.0, 124.0)
        """
        lanes, work, values = np.array(points, np.float64).T
        terms = np.stack([np.ones(len(points)), lanes, work, lanes * work], 1)
        return cls(*np.linalg.lstsq(terms, values, rcond=None)[0].tolist())

    def of(self, lanes: float, work: float) -> float:
        """Value for a call with m lanes and so many steps, or samples, in the longest."""
        return max(self.at + self.lane * lanes + work * (self.each + self.both * lanes), 0.0)


@dataclass(frozen=True)
class CallCost:
    """Cost of a call of the executor, which has one lane where clients are computed one by one.

    Attributes:
        seconds, memory, device: as in `Cost`, by lanes and steps of a training, by lanes and test samples of a test.
    """

    seconds: Plane
    memory: Plane
    device: Plane

    @classmethod
    def through(cls, points: Sequence[tuple[int, int, Cost]]) -> "CallCost":
        """Cost of a call from lanes, work and cost of some calls."""
        seconds, memory, device = (
            Plane.through([(lanes, work, getattr(cost, name)) for lanes, work, cost in points])
            for name in ("seconds", "memory", "device")
        )
        return cls(seconds, memory, device)

    def of(self, lanes: float, work: float) -> Cost:
        """Cost of a call with so many lanes and so many steps, or samples, in the longest."""
        return Cost(self.seconds.of(lanes, work), self.memory.of(lanes, work), self.device.of(lanes, work))


@dataclass(frozen=True)
class Calibration:
    """What the clients of one cohort cost on this machine.

    Attributes:
        train, test: of a call; the test without adapting.
        adapt: seconds of a lane's step where clients adapt before they are tested.
        fold: of a round's messages on rank 0; seconds of one of them, on any rank.
        serve: of updating the server and publishing.
        library: bytes that the first call brings into memory to stay.
    """

    train: CallCost
    test: CallCost
    adapt: float
    fold: Cost
    serve: Cost
    library: float


@dataclass(frozen=True)
class GroupCosts:
    """Cost of each group of clients on this machine.

    Attributes:
        setup: of the run.
        calibrations: by cohort.
    """

    setup: Setup
    calibrations: Mapping[int, Calibration]

    def train(self, group: ClientGroup) -> Cost:
        """Cost of a training."""
        return self._cohort(group).train.of(len(group), self._steps(group))

    def test(self, group: ClientGroup) -> Cost:
        """Cost of a test, with the adapting before it."""
        one = self._cohort(group)
        cost = one.test.of(len(group), int(self.setup.num_test[group].max()))
        return replace(cost, seconds=cost.seconds + one.adapt * self._steps(group) * len(group))

    def _cohort(self, group: ClientGroup) -> Calibration:
        return self.calibrations[int(self.setup.executor.cohort[group[0]])]

    def _steps(self, group: ClientGroup) -> int:
        return self.setup.task.training.num_steps(int(self.setup.executor.federation.num_train[group].max()))
