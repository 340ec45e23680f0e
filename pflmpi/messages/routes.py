"""Which way folded messages take to rank 0: a pure function of their sizes and of who computes whom."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from pflmpi.messages.entries import Entries
from pflmpi.messages.groups import ClientGroup
from pflmpi.messages.kinds import Call

_WORD = 8  # bytes of a float64 or int64
_LEAST_SLICE = 2**16  # bytes of a message; a smaller slice costs another rank more than it saves
_GATHERED = 2**18  # bytes that other ranks send rank 0 at most, where it folds alone

Way = Literal["gather", "sum", "slices", "sums of slices"]


@dataclass(frozen=True)
class Route:
    """How the entries of the participants are folded.

    gather: rank 0 gathers the messages, with those that are gathered anyway, and folds them.
    sum: each rank sums those of its participants as int64, rank 0 gets the sum of the sums.
    slices: each rank folds a slice of the vector of entries, of which all others send it their participants' own;
        rank 0 gathers what is folded.
    sums of slices: likewise, but a rank sends the int64 sum over its participants.

    Attributes:
        bounds: [R + 1] the slice of rank r is from `bounds[r]` to `bounds[r + 1]`.
        participants: [R] whose messages each rank has.
    """

    way: Way
    entries: Entries
    bounds: np.ndarray
    participants: np.ndarray

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
        """Bytes before the entries in a part of `slices`: the largest magnitude of each leaf."""
        return _WORD * len(self.entries.like)

    @property
    def exchanged(self) -> np.ndarray:
        """[R, R] bytes that each rank sends to each owner of a slice."""
        senders = self.participants[:, np.newaxis]
        if self.way == "gather":
            return np.zeros((len(senders),) * 2, np.int64)
        parts: np.ndarray
        if self.way == "slices":
            parts = self.head + senders * self.slice_bytes
        else:
            parts = _WORD * np.diff(self.bounds) * np.ones_like(senders)
        parts[(senders == 0) | (np.diff(self.bounds) == 0)] = 0
        np.fill_diagonal(parts, 0)
        return parts

    @property
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
        exchanged = self.exchanged
        calls = [magnitudes] if self.way == "sums of slices" else []
        if exchanged.any():
            sent, received = exchanged.sum(1).tolist(), exchanged.sum(0).tolist()
            calls.append(Call("all-to-all", tuple(sent), tuple(received)))
        if any(self.finished):
            calls.append(Call("gather", tuple(self.finished)))
        return calls


def route(entries: Entries, assigned: list[list[ClientGroup]]) -> Route:
    """The way that costs least where ranks have the given groups of participants."""
    ranks, count = len(assigned), entries.count
    participants = np.array([sum(map(len, groups)) for groups in assigned], np.int64)
    size = int(entries.bytes_before(np.array([count]))[0])
    senders, ids = np.flatnonzero(participants), np.arange(ranks + 1)
    if len(senders) == 1:  # it has everything
        return Route("slices", entries, np.where(ids > senders[0], count, 0), participants)
    all_on_0 = np.where(ids > 0, count, 0)
    if participants[1:].sum() * size <= _GATHERED:
        return Route("gather", entries, all_on_0, participants)
    owners = min(ranks, size // _LEAST_SLICE)
    if owners < 2:
        return Route("sum", entries, all_on_0, participants)
    few = participants.max() * size <= _WORD * count
    return Route(
        "slices" if few else "sums of slices", entries, count * np.minimum(ids, owners) // owners, participants
    )
