"""Ranks as threads that can die before a chosen call, while the others go on as they do with ULFM."""

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

from pflmpi.errors import RankLost
from pflmpi.testing.thread_ranks import Group, RankGone, ThreadTransport
from pflmpi.transports.peers import Peer

T = TypeVar("T")


class Died(BaseException):
    """Ends the thread of a rank that dies."""


class MortalGroup(Group):
    """What the ranks share until one is lost."""

    def __init__(self, size: int, timeout: float) -> None:
        super().__init__(size, timeout)
        self.revoked = False
        self.votes: dict[int, dict[int, bool]] = defaultdict(dict)  # by number of the vote, by rank
        self.decided: dict[int, bool] = {}
        self.leaving: set[int] = set()
        self.survivors: list[int] = []
        self.after: MortalGroup | None = None

    def wait(self, ready: Callable[[], bool], lost: Callable[[], set[int]], operation: str) -> None:
        super().wait(ready, lambda: lost() or ({-1} if self.revoked else set()), operation)

    def everyone(self, present: Callable[[], set[int]], operation: str) -> None:
        """Wait, holding `changed`, until every rank is present or gone."""
        Group.wait(self, lambda: len(present() | self.gone) == self.size, set, operation)


class MortalTransport(ThreadTransport):
    """A rank that dies before its call number `last`, counted from 0; None for one that lives."""

    fault_tolerant = True

    def __init__(self, rank: int, group: MortalGroup, last: int | None) -> None:
        super().__init__(rank, group)
        self.group = group
        self.made = 0
        self._last = last
        self._voted = 0
        self.peers = [Peer("host", number) for number in range(group.size)]

    def _live(self) -> None:
        if self.made == self._last:
            raise Died
        self.made += 1

    def _collective(self, operation: str, value: np.ndarray) -> list[np.ndarray]:
        self._live()
        try:
            return super()._collective(operation, value)
        except RankGone as gone:
            raise RankLost(str(gone)) from gone

    def _exchange(self, operation: str, sent: dict[int, np.ndarray], received: dict[int, np.ndarray]) -> None:
        self._live()
        try:
            super()._exchange(operation, sent, received)
        except RankGone as gone:
            raise RankLost(str(gone)) from gone

    def all_well(self, well: bool) -> bool:
        self._live()
        group, self._voted = self.group, self._voted + 1
        with group.changed:
            votes = group.votes[self._voted]
            votes[self.rank] = well
            group.revoked |= not well
            group.changed.notify_all()
            group.everyone(lambda: set(votes), "agreement")
            return group.decided.setdefault(self._voted, len(votes) == group.size and all(votes.values()))

    def drop_lost(self) -> list[int]:
        self._live()
        before = self.group
        with before.changed:
            before.leaving.add(self.rank)
            before.changed.notify_all()
            before.everyone(lambda: before.leaving, "repair")
            if before.after is None:
                before.survivors = sorted(before.leaving - before.gone)
                before.after = MortalGroup(len(before.survivors), before.timeout)
        gone = sorted(set(range(before.size)) - set(before.survivors))
        self.group = self._group = before.after
        self.rank, self.size = before.survivors.index(self.rank), len(before.survivors)
        self.peers = [self.peers[rank] for rank in before.survivors]
        self._calls = self._voted = 0
        return gone


def run_mortal(
    size: int, function: Callable[[MortalTransport], T], last: Mapping[int, int], timeout: float = 60.0
) -> tuple[dict[int, T], list[MortalTransport]]:
    """What the function returns on the ranks that live, by their number at the start, and all transports.

    Args:
        last: before which call each rank dies, for those that do.
    """
    first = MortalGroup(size, timeout)
    transports = [MortalTransport(rank, first, last.get(rank)) for rank in range(size)]
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def work(number: int) -> None:
        try:
            results[number] = function(transports[number])
        except Died:
            pass
        except BaseException as error:
            errors[number] = error
        finally:
            transports[number].group.leave(transports[number].rank)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return results, transports
