"""Sums and averages the participants' messages on rank 0, with the same bits on any number of ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from pflmpi import tree
from pflmpi.errors import RunError
from pflmpi.messages.declared import Declared
from pflmpi.messages.device_sum import OnDevice
from pflmpi.messages.exact import Addends, OnHost, Part, common_shift
from pflmpi.messages.groups import ClientGroup, clients_of_all
from pflmpi.messages.kinds import Mean, Messages, Updates
from pflmpi.messages.packing import NOTHING, to_numpy
from pflmpi.messages.slices import Piece, Slices
from pflmpi.transports.base import Transport

_LARGEST_SUM = 2.0**62  # of integers: half of int64, so that rounded magnitudes decide safely

Write = Callable[[Piece, Part], None]  # writes the sums or means of a piece to a buffer


@dataclass(frozen=True)
class Fold:
    """Computes the exact sums and means of a round's messages."""

    declared: Declared
    slices: Slices  # of the folded messages
    assigned: list[list[ClientGroup]]  # the groups of participants of each rank
    adds: OnHost | OnDevice  # on the host or on the GPU of this rank, with the same bits

    def over(self, transport: Transport, ups: Updates) -> Messages | None:
        """Returns the sums and means on rank 0, None on other ranks.

        Args:
            ups: messages of the groups here, on the host or on the GPU.
        """
        rank, slices, entries = transport.rank, self.slices, self.slices.entries
        addends = self._addends(ups)
        largest = self._largest(addends, entries.pieces(0, entries.count))
        if slices.sums.any():
            largest = transport.maximum(largest)
        others = [other for other in np.flatnonzero(slices.sent_by(rank)).tolist() if other != rank]
        parts = {other: self._part(addends, largest, other, rank) for other in others}
        received: dict[int, Part] = {}
        if moved := slices.traffic.moved:
            sizes = slices.received_by(rank)
            arriving = {other: int(sizes[other]) for other in np.flatnonzero(sizes).tolist() if other != rank}
            received = transport.exchange(parts, arriving, moved, empty=self.adds.empty)
        return self._finished(transport, self._writer(addends, largest, received, rank))

    def _addends(self, ups: Updates) -> Addends:
        """Returns the messages of the clients of this rank as addends."""
        if not ups or not self.slices.entries.count:
            return []
        messages = [{name: messages[name] for name in self.declared.folded} for _, messages in ups]
        groups = [[tree.flat_rows(leaf) for _, leaf in tree.leaves({**group})] for group in messages]
        return self.adds.addends(groups, [self._weights(clients) for clients, _ in ups])

    def _largest(self, addends: Addends, pieces: list[Piece]) -> np.ndarray:
        """Returns the largest magnitude in the given pieces of each leaf [M], times the weights."""
        largest = np.zeros(len(self.slices.entries.like))
        if addends and pieces:
            terms = [_terms(addends, piece) for piece in pieces]
            largest[[piece.leaf for piece in pieces]] = self.adds.largest(terms)
        return largest

    def _part(self, addends: Addends, largest: np.ndarray, owner: int, rank: int) -> Part:
        """Packs what an owner gets: sums, or magnitudes and the clients' entries, group by group."""
        slices, entries = self.slices, self.slices.entries
        part: Part = self.adds.empty(int(slices.sent_by(rank)[owner]))
        start, stop = slices.slice(owner)
        pieces = entries.pieces(start, stop)
        if slices.sums[rank]:
            total, shifts = self.adds.words(part), self._shifts(largest)
            for piece in pieces:
                self.adds.add(entries.cut(total, piece, start), _terms(addends, piece), shifts[piece.leaf])
        else:
            self.adds.put(part[: slices.head], largest.view(np.uint8)[: slices.head])
            body = part[slices.head :].reshape(int(slices.participants[rank]), -1)
            for piece in pieces:
                self.adds.join([values for values, _ in _terms(addends, piece)], entries.cut_bytes(body, piece))
        return part

    def _writer(self, addends: Addends, largest: np.ndarray, received: dict[int, Part], rank: int) -> Write:
        """Returns the function that folds a piece of this rank's slice, with what other ranks have sent.

        Raises:
            RunError: a sum of integers may leave int64.
        """
        slices, entries, (start, stop) = self.slices, self.slices.entries, self.slices.slice(rank)
        sums: list[Part] = []
        heads: list[Part] = []
        for other, part in received.items():
            if slices.sums[other]:
                sums.append(self.adds.words(part))
                continue
            weights = self._weights(np.concatenate(self.assigned[other]))
            rows = part[slices.head :].reshape(weights.shape[1], -1)
            addends = [*addends, *self.adds.received(entries, rows, weights)]
            if slices.head:
                heads.append(part[: slices.head])
            elif not slices.sums.any():  # this rank sees the entries of all clients
                largest = np.maximum(largest, self._largest(addends[-1:], entries.pieces(start, stop)))
        if heads:
            largest = np.max([largest, *(self.adds.to_host(head).view(np.float64) for head in heads)], 0)
        self._check_integers(largest)
        shifts = self._shifts(largest)

        def write(piece: Piece, out: Part) -> None:
            piece_sums = [entries.cut(total, piece, start) for total in sums]
            divisor, like = self._divisors[piece.leaf], entries.like[piece.leaf]
            self.adds.finish(_terms(addends, piece), piece_sums, shifts[piece.leaf], divisor, like.dtype, out)

        return write

    def _finished(self, transport: Transport, write: Write) -> Messages | None:
        """Folds this rank's slice; returns the slices of all ranks on rank 0, None on other ranks."""
        entries, finished = self.slices.entries, self.slices.finished
        pieces = entries.pieces(*self.slices.slice(transport.rank))

        def own_slice() -> Part:
            buffer = self.adds.empty(int(self.slices.slice_bytes[transport.rank]))
            for piece in pieces:
                write(piece, entries.cut_bytes(buffer, piece))
            return buffer

        if transport.rank != 0:
            buffer = own_slice()
            if any(finished):
                transport.gather(buffer, finished)
            return None
        leaves = [torch.empty(leaf.shape, dtype=leaf.dtype) for leaf in entries.like]
        flat = [to_numpy(leaf.view(-1)) for leaf in leaves]
        slices = [NOTHING] * transport.size
        if isinstance(self.adds, OnHost):
            for piece in pieces:
                write(piece, flat[piece.leaf][piece.start : piece.stop])
        elif pieces:
            slices[0] = self.adds.to_host(own_slice())
        if any(finished):
            slices[1:] = (transport.gather(NOTHING, finished) or [])[1:]
        for rank, packed in enumerate(slices):
            for piece in entries.pieces(*self.slices.slice(rank)) if len(packed) else ():
                flat[piece.leaf][piece.start : piece.stop] = entries.cut_bytes(packed, piece)
        return tree.unflatten(dict(zip(entries.paths, leaves, strict=True)))  # type: ignore[return-value]

    def _shifts(self, largest: np.ndarray) -> list[int]:
        """Returns the shift of each leaf [M]; 0 for integers."""
        shifts = common_shift(largest, int(self.slices.participants.sum()))
        return [
            shift if leaf.is_floating_point() else 0
            for shift, leaf in zip(shifts.tolist(), self.slices.entries.like, strict=True)
        ]

    def _check_integers(self, largest: np.ndarray) -> None:
        participants, entries = int(self.slices.participants.sum()), self.slices.entries
        for path, like, how, value in zip(entries.paths, entries.like, self._weightings, largest.tolist(), strict=True):
            if how == "sum" and not like.is_floating_point() and value * participants > _LARGEST_SUM:
                raise RunError(
                    f"the sum of {path} over {participants} participants may leave int64: the largest "
                    f"magnitude is {value:.0f}; send smaller numbers, or float32"
                )

    def _weights(self, clients: np.ndarray) -> np.ndarray:
        """Returns the weight of each client in the sum of each leaf, float64 [M, m]."""
        ones = np.ones(len(clients))
        by_weighting = {
            "sum": ones,
            "clients": ones,
            "samples": self.declared.num_train[clients].astype(np.float64),
            "first": (clients == self._participants[0]).astype(np.float64),
        }
        weights = [by_weighting[weighting] for weighting in self._weightings]
        return np.array(weights).reshape(len(weights), len(clients))

    @cached_property
    def _divisors(self) -> list[float]:
        """What the sum of each leaf is divided by, [M]."""
        totals = self._weights(self._participants).sum(1).tolist()
        return [1.0 if how == "sum" else total for how, total in zip(self._weightings, totals, strict=True)]

    @cached_property
    def _weightings(self) -> list[str]:
        """How clients are weighted in each leaf [M]; "first": a mean of integers is the first participant's value."""
        entries, weightings = self.slices.entries, []
        for path, leaf in zip(entries.paths, entries.like, strict=True):
            kind = self.declared.folded[path.split("/")[0]]
            if not isinstance(kind, Mean):
                weightings.append("sum")
            else:
                weightings.append(kind.by if leaf.is_floating_point() else "first")
        return weightings

    @cached_property
    def _participants(self) -> np.ndarray:
        return clients_of_all(self.assigned)


def _terms(addends: Addends, piece: Piece) -> list[Any]:
    """Returns the values of a piece and their weights, for each group of clients."""
    return [(values(piece), weights[piece.leaf]) for weights, values in addends]
