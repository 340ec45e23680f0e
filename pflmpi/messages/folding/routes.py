"""Which way folded messages take to rank 0: a pure function of their sizes and of who computes whom.

Of a large model in float32, a rank with one participant sends at most one model. A rank with several sends at most
two, less its slice, of which it sends only the result; slices belong to ranks with participants then, so that two of
them send at most 1.5 models, three 1.67. Messages of a fixed size cannot be much smaller: any of the about 60 bits of
an exact sum may decide how the result is rounded. So where three ranks have several participants each, one of them
sends more than 1.5 models, however the slices are cut.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from pflmpi.messages.all_to_all import AllToAll
from pflmpi.messages.calls import Call
from pflmpi.messages.entries import Entries
from pflmpi.messages.groups import ClientGroup, clients_per_rank

_WORD = 8  # bytes of a float64 or int64
_LEAST_SLICE = 2**16  # bytes of a message; a smaller slice costs another rank more than it saves
_GATHERED = 2**18  # bytes that other ranks send rank 0 at most, where it folds alone

Way = Literal["gather", "sum", "slices"]


@dataclass(frozen=True)
class Route:
    """How the entries of the participants are folded.

    gather: rank 0 gathers the messages, with those that are gathered anyway, and folds them.
    sum: each rank sums those of its participants as int64, rank 0 gets the sum of the sums.
    slices: some ranks own a slice of the vector of entries each, and fold it; the others send them their participants'
        entries, or the int64 sum over these where that is smaller. Rank 0 gathers what is folded.

    Attributes:
        bounds: [R + 1] the slice of rank r is from `bounds[r]` to `bounds[r + 1]`.
        participants: [R] whose messages each rank has.
        sums: [R] bool, whether a rank sends the owners of slices sums.
    """

    way: Way
    entries: Entries
    bounds: np.ndarray
    participants: np.ndarray
    sums: np.ndarray

    def slice(self, rank: int) -> tuple[int, int]:
        """Where a rank's slice begins and ends."""
        start, stop = self.bounds[rank : rank + 2].tolist()
        return start, stop

    @property
    def slice_bytes(self) -> np.ndarray:
        """[R] bytes of a message in each rank's slice."""
        sizes: np.ndarray = np.diff(self.entries.bytes_before(self.bounds))
        return sizes

    @property
    def head(self) -> int:
        """Bytes before the entries in a part of `slices`: the largest magnitude of each leaf, unless all know them."""
        return 0 if self.sums.any() else _WORD * len(self.entries.like)

    @cached_property
    def exchanged(self) -> AllToAll:
        """Bytes that each rank has for each owner of a slice: sums, or a head and entries."""
        widths = np.diff(self.bounds)
        if self.way != "slices":
            return AllToAll(((np.zeros_like(widths), np.zeros_like(widths)),))
        heads, entries = (self.participants > 0) & ~self.sums, np.where(self.sums, 0, self.participants)
        return AllToAll(((_WORD * self.sums, widths), (self.head * heads, widths > 0), (entries, self.slice_bytes)))

    @cached_property
    def finished(self) -> list[int]:
        """[R] bytes of the folded slices that rank 0 gathers."""
        return [0, *self.slice_bytes[1:].tolist()]

    @property
    def calls(self) -> list[Call]:
        """The collective calls, with the bytes of each rank; none of `gather`, which belong to the others."""
        ranks, count = len(self.participants), self.entries.count
        if self.way == "gather":
            return []
        magnitudes = Call("maximum", (_WORD * len(self.entries.like),) * ranks)
        if self.way == "sum":
            return [magnitudes, Call("sum", (_WORD * count,) * ranks)]
        calls = [magnitudes] if self.sums.any() else []
        if self.exchanged.moved:
            calls.append(self.exchanged.call())
        if any(self.finished):
            calls.append(Call("gather", tuple(self.finished)))
        return calls


def route(entries: Entries, assigned: list[list[ClientGroup]]) -> Route:
    """The way that costs least where ranks have the given groups of participants."""
    ranks, count, size = len(assigned), entries.count, entries.size
    participants = clients_per_rank(assigned)
    senders, none = np.flatnonzero(participants), np.zeros(ranks, bool)
    if len(senders) == 1:  # it has everything
        return Route("slices", entries, _bounds(count, ranks, senders), participants, none)
    all_on_0 = _bounds(count, ranks, np.array([0]))
    if participants[1:].sum() * size <= _GATHERED:
        return Route("gather", entries, all_on_0, participants, none)
    # A rank sends nothing but the result of its own slice: those that have most to send come first.
    owners = np.argsort(-participants, kind="stable")[: len(senders) if participants.max() > 1 else ranks]
    owners = np.sort(owners[: size // _LEAST_SLICE])
    if len(owners) < 2:
        return Route("sum", entries, all_on_0, participants, none)
    return Route("slices", entries, _bounds(count, ranks, owners), participants, participants * size > _WORD * count)


def _bounds(count: int, ranks: int, owners: np.ndarray) -> np.ndarray:
    """[R + 1] bounds of equal slices of the given ranks, empty ones of the others."""
    bounds: np.ndarray = count * np.searchsorted(owners, np.arange(ranks + 1)) // len(owners)
    return bounds
