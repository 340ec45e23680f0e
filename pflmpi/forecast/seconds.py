"""An estimate of the seconds of a round: the slowest rank trains and tests, and messages cross a link one by one."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pflmpi.forecast.measuring import Costs
from pflmpi.forecast.ranks import Ranks
from pflmpi.messages.groups import ClientGroup
from pflmpi.runtime.round_schedule import RoundSchedule


@dataclass(frozen=True)
class Seconds:
    """Seconds of a round, on average; without those of the server, of checkpoints, and of sums of messages.

    Attributes:
        train: of the slowest rank.
        messages: between nodes; None where a link is not known.
        test: of the slowest rank; a round without an evaluation counts with 0.
    """

    train: float
    messages: float | None
    test: float

    @property
    def round(self) -> float:
        """All together."""
        return self.train + (self.messages or 0.0) + self.test


def message_seconds(
    moved: float, calls: float, ranks: int, nodes: int, delay: float | None, rate: float | None
) -> float | None:
    """Bytes that leave a node over the rate of its link, and each call's hops down a tree of the nodes.

    >>> message_seconds(moved=4e6, calls=2, ranks=4, nodes=4, delay=0.01, rate=1e6)  # 3 MB leave; 2 calls of 2 hops
    3.04
    """
    if ranks == 1:
        return 0.0
    if delay is None or rate is None:
        return None
    return moved * (nodes - 1) / nodes / rate + calls * (nodes - 1).bit_length() * delay


def compute_seconds(ranks: Ranks, cores: int, rounds: Sequence[RoundSchedule], costs: Costs) -> tuple[float, float]:
    """Seconds of training and of testing on the slowest rank; `cores` of a node, the first `rounds`."""

    def testing(one: RoundSchedule) -> float:
        seconds = _slowest(ranks, cores, one.testing, lambda group: costs.test(group).seconds)
        if one.tests_trained:
            seconds += _slowest(ranks, cores, one.training, lambda group: costs.test(group).seconds)
        return seconds + (_slowest(ranks, cores, one.unseen.groups, costs.unseen) if one.unseen else 0.0)

    train = [_slowest(ranks, cores, one.training, lambda group: costs.train(group).seconds) for one in rounds]
    return float(np.mean(train)), float(np.mean([testing(one) for one in rounds]))


def _slowest(ranks: Ranks, cores: int, groups: list[list[ClientGroup]], cost: Callable[[ClientGroup], float]) -> float:
    """Seconds of the slowest rank for its groups, beside the ranks of its node that compute at the same time."""
    busy = Counter(device for device, mine in zip(ranks.device, groups, strict=True) if mine)
    slowest = 0.0
    for device, mine in zip(ranks.device, groups, strict=True):
        turns = busy[device] if device[1] is not None else busy[device] * ranks.runtime.threads / cores
        slowest = max(slowest, max(turns, 1.0) * sum(map(cost, mine)))
    return slowest
