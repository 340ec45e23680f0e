"""Seconds per round: the slowest rank trains, messages move, rank 0 updates and stores, the slowest rank tests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pflmpi.forecast.calibration import Calibration
from pflmpi.forecast.communication import Network, communication_seconds
from pflmpi.forecast.memory import longest_steps
from pflmpi.forecast.ranks import Ranks
from pflmpi.messages.groups import ClientGroup, clients_of
from pflmpi.runtime.schedule import RoundSchedule
from pflmpi.runtime.setup import Setup

_TALKS = 3  # rounds whose calls are followed; they differ little


@dataclass(frozen=True)
class Seconds:
    """Of a round, on average.

    Attributes:
        train: of the slowest rank.
        talk: calls of the transport; None where no link is known.
        serve: folding of messages, and rank 0's update.
        test: of the slowest rank; of a round without an evaluation 0 goes into the average.
        store: for which a checkpoint keeps rank 0 from training.
    """

    train: float
    talk: float | None
    serve: float
    test: float
    store: float

    @property
    def round(self) -> float:
        """All together."""
        return self.train + (self.talk or 0.0) + self.serve + self.test + self.store


def seconds(
    ready: Setup,
    ranks: Ranks,
    cores: int,
    ahead: Sequence[RoundSchedule],
    calibrations: Mapping[int, Calibration],
    network: Network | None,
    transport: Literal["inprocess", "mpi", "torch"],
    checkpoint: float,
) -> Seconds:
    """Return the predicted seconds of a round.

    Args:
        cores: of a node.
        ahead: the rounds that are looked at.
        calibrations: by cohort.
        network: None where it is not known.
        checkpoint: seconds for which one keeps rank 0 from training.
    """
    train, fold, test = [], [], []
    for one in ahead:
        training, testing = _slower(ranks, cores, one.training), _slower(ranks, cores, one.testing)
        trained, folded, tested = (np.zeros(ranks.count) for _ in range(3))
        for rank in range(ranks.count):
            trained[rank] = sum(_train(ready, group, calibrations) for group in one.training[rank])
            tested[rank] = sum(_test(ready, group, calibrations) for group in one.testing[rank])
            folded[rank] = len(clients_of(one.training[rank])) * calibrations[0].fold
        train.append(float((trained * training).max()))
        test.append(float((tested * testing).max()))
        fold.append(float((folded * training).max()))
    talk = None
    if network is not None:
        talk = float(np.mean([communication_seconds(one.calls, network, transport) for one in ahead[:_TALKS]]))
    return Seconds(
        train=float(np.mean(train)),
        talk=talk,
        serve=float(np.mean(fold)) + calibrations[0].serve,
        test=float(np.mean(test)),
        store=checkpoint / ready.checkpoint.every,
    )


def _slower(ranks: Ranks, cores: int, work: list[list[ClientGroup]]) -> np.ndarray:
    """Return [R], how many times longer a rank computes because others of its node compute at the same time."""
    factors = np.ones(ranks.count)
    for rank in range(ranks.count):
        busy = sum(bool(work[other]) for other in ranks.sharing(rank))
        factors[rank] = max(busy if ranks.gpu[rank] is not None else busy * ranks.runtime.threads / cores, 1.0)
    return factors


def _train(ready: Setup, group: ClientGroup, calibrations: Mapping[int, Calibration]) -> float:
    return calibrations[int(ready.executor.cohort[group[0]])].train.of(len(group), longest_steps(ready, group))


def _test(ready: Setup, group: ClientGroup, calibrations: Mapping[int, Calibration]) -> float:
    one = calibrations[int(ready.executor.cohort[group[0]])]
    adapting = one.adapt * longest_steps(ready, group) * len(group)
    return one.test.of(len(group), int(ready.num_test[group].max())) + adapting
