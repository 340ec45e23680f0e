"""The report that every rank sends rank 0 at the end of a round: scores, seconds, what is on disk."""

from dataclasses import dataclass

import numpy as np

from pflmpi.messages.groups import ClientGroup, clients_of
from pflmpi.messages.kinds import Call
from pflmpi.transports.base import Transport

_HEAD = 2  # int64: microseconds of work, newest checkpoint whose shard is on disk


@dataclass(frozen=True)
class RoundReport:
    """What rank 0 knows of a round from all ranks.

    Attributes:
        correct: [T] test samples that the tested clients get right, in ascending order of their ids; unseen ones last.
        busiest: seconds that the slowest rank computed.
        shards_done: newest round whose shards are all on disk.
    """

    correct: np.ndarray
    busiest: float
    shards_done: int


def gather(
    transport: Transport, testing: list[list[ClientGroup]], right: np.ndarray, busy: float, shards_done: int
) -> RoundReport | None:
    """Collect the reports of all ranks on rank 0; None elsewhere.

    Args:
        testing: the groups tested by each rank.
        right: test samples that the clients tested here get right, in ascending order of their ids.
        busy: seconds that this rank computed.
        shards_done: newest round whose shard this rank has written.
    """
    part = np.concatenate([[int(busy * 1e6), shards_done], right]).astype(np.int64)
    parts = transport.gather(part.view(np.uint8), list(call(testing).sizes))
    if parts is None:
        return None
    values = [buffer.view(np.int64) for buffer in parts]
    order = np.argsort(np.concatenate([clients_of(groups) for groups in testing]), kind="stable")
    return RoundReport(
        correct=np.concatenate([value[_HEAD:] for value in values])[order],
        busiest=max(int(value[0]) for value in values) / 1e6,
        shards_done=min(int(value[1]) for value in values),
    )


def call(testing: list[list[ClientGroup]]) -> Call:
    """The collective call of `gather`."""
    return Call("gather", tuple(8 * (_HEAD + sum(map(len, groups))) for groups in testing))
