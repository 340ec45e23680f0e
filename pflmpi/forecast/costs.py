"""Cost of groups of clients, from the cost of a few measured calls."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cache

import numpy as np

from pflmpi.forecast.process import Cost
from pflmpi.messages.groups import ClientGroup
from pflmpi.runtime.setup import Setup


@dataclass(frozen=True)
class CallCost:
    """Cost of a call of the executor: at + lane m + work (each + both m), for m lanes and the work of the longest.

    Where clients are computed one by one, a call has one lane.
    """

    at: Cost
    lane: Cost
    each: Cost
    both: Cost

    @classmethod
    def through(cls, calls: Sequence[tuple[int, int, Cost]]) -> "CallCost":
        """Cost from lanes, work and cost of some calls.

        >>> costs = {(1, 10): 12, (1, 20): 22, (3, 10): 34, (3, 20): 64}  # seconds: 1 + m + m work
        >>> found = CallCost.through([(*call, Cost(seconds, 0, 0)) for call, seconds in costs.items()])
        >>> round(found.of(2, 10).seconds, 3), round(found.of(3, 40).seconds, 3)
        (23.0, 124.0)
        """
        terms = np.array([(1, lanes, work, lanes * work) for lanes, work, _ in calls], np.float64)
        found = np.linalg.lstsq(terms, np.array([astuple(cost) for *_, cost in calls]), rcond=None)[0]
        return cls(*(Cost(*numbers) for numbers in found.tolist()))

    def of(self, lanes: int, work: int) -> Cost:
        """Cost of a call."""
        return _cost(self, lanes, work)


@cache  # the same few calls are asked for again and again
def _cost(call: CallCost, lanes: int, work: int) -> Cost:
    numbers = np.array([astuple(cost) for cost in (call.at, call.lane, call.each, call.both)])
    return Cost(*np.maximum((1, lanes, work, lanes * work) @ numbers, 0).tolist())


@dataclass(frozen=True)
class Calibration:
    """What the clients of one cohort cost on this machine.

    Attributes:
        train: of a call, by lanes and steps.
        test: of a call, by lanes and `test_work`.
        fold: of a round's messages on rank 0; seconds of one of them, on any rank.
        serve: of updating the server and publishing.
        library: bytes that the first call brings into memory to stay.
    """

    train: CallCost
    test: CallCost
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
        work = test_work(self.setup, self._steps(group), int(self.setup.num_test[group].max()))
        return self._cohort(group).test.of(len(group), work)

    def unseen(self, group: ClientGroup) -> float:
        """Seconds of a test of unseen clients, with the training before it."""
        unseen = self.setup.unseen
        assert unseen is not None
        federation, calibration = unseen.executor.federation, self.calibrations[int(unseen.executor.cohort[group[0]])]
        steps = self.setup.task.training.num_steps(int(federation.num_train[group].max()))
        work = test_work(self.setup, steps, int(federation.num_test[group].max()))
        train, test = calibration.train.of(len(group), steps), calibration.test.of(len(group), work)
        return unseen.updates * train.seconds + test.seconds

    def _cohort(self, group: ClientGroup) -> Calibration:
        return self.calibrations[int(self.setup.executor.cohort[group[0]])]

    def _steps(self, group: ClientGroup) -> int:
        return self.setup.task.training.num_steps(int(self.setup.executor.federation.num_train[group].max()))


def test_work(setup: Setup, steps: int, tests: int) -> int:
    """Samples that pass a client's model in a test, forward; adapting is forward, and twice as much backward."""
    return tests + (3 * steps * setup.task.training.batch_size if setup.executor.adapts else 0)
