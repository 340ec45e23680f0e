"""Sums and means of the participants' messages on rank 0, with the same bits on any number of ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.messages.declared import Declared
from pflmpi.messages.device_sum import DeviceSum, is_on_host, on_host
from pflmpi.messages.exact import Terms, add_fixed, common_shift, fold_exactly, magnitudes
from pflmpi.messages.groups import ClientGroup, clients_of_all
from pflmpi.messages.kinds import Mean, Messages, Updates
from pflmpi.messages.packing import NOTHING, to_numpy
from pflmpi.messages.slices import Piece, Slices
from pflmpi.transports.base import Transport

_WORD = 8  # bytes of an int64
Pack = Callable[[np.ndarray], None]  # writes this rank's part of the messages that rank 0 gathers
# Of some clients: their weights [M, m] in each leaf, and what gives their values [m, n] of a piece.
Addends = list[tuple[np.ndarray, Callable[[Piece], np.ndarray]]]
Write = Callable[[Piece, np.ndarray], None]  # writes the sums or means of a piece to an array


@dataclass(frozen=True)
class Fold:
    """The exact sums and means of a round's messages.

    Attributes:
        slices: of the messages that are folded.
        assigned: the groups of participants of each rank.
    """

    declared: Declared
    slices: Slices
    assigned: list[list[ClientGroup]]

    def over(self, transport: Transport, ups: Updates, pack: Pack) -> tuple[Messages | None, list[np.ndarray]]:
        """The sums and means on rank 0, None on the others; on rank 0, what each other rank has packed for it.

        Args:
            ups: of the groups computed here, on the host or on the GPU.
            pack: for the messages that are gathered.
        """
        here, slices, entries = transport.rank, self.slices, self.slices.entries
        addends, on_gpu = self._addends(ups, here)
        largest = self._largest(addends, entries.pieces(0, entries.count))
        if on_gpu:
            largest = np.maximum(largest, on_gpu.largest())
        if slices.sums.any():
            largest = transport.maximum(largest)
        others = [rank for rank in np.flatnonzero(slices.sent_by(here)).tolist() if rank != here]
        parts = {rank: self._part(addends, on_gpu, largest, rank, here, pack) for rank in others}
        received: dict[int, np.ndarray] = {}
        if moved := slices.traffic.moved:
            sizes = slices.received_by(here)
            arriving = {rank: int(sizes[rank]) for rank in np.flatnonzero(sizes).tolist() if rank != here}
            received = transport.exchange(parts, arriving, moved)
        folded = self._finished(transport, self._writer(addends, on_gpu, largest, received, here))
        if folded is None:
            return None, []
        gathered = slices.gathered.tolist()
        return folded, [received[rank][-size:] if rank and size else NOTHING for rank, size in enumerate(gathered)]

    def _addends(self, ups: Updates, rank: int) -> tuple[Addends, DeviceSum | None]:
        """The messages on the host, and those on the GPU; all on the host where other ranks get them as they are."""
        groups = [(clients, {name: messages[name] for name in self.declared.folded}) for clients, messages in ups]
        to_host = not self.slices.sums[rank] and any(owner != rank for owner in np.flatnonzero(self.slices.widths))
        addends: Addends = []
        there: list[tuple[ClientGroup, list[Tensor]]] = []
        for clients, messages in groups:
            leaves = [leaf for _, leaf in tree.leaves({**(on_host(messages) if to_host else messages)})]
            if to_host or is_on_host(messages):
                rows = [to_numpy(tree.flat_rows(leaf)) for leaf in leaves]
                addends.append((self._weights(clients), partial(_values, rows)))
            else:
                there.append((clients, leaves))
        if not there:
            return addends, None
        weights = self._weights(np.concatenate([clients for clients, _ in there]))
        return addends, DeviceSum([leaves for _, leaves in there], weights)

    def _largest(self, addends: Addends, pieces: Sequence[Piece]) -> np.ndarray:
        """[M] the largest magnitude in some pieces of each leaf, times the weights."""
        largest = np.zeros(len(self.slices.entries.like))
        for piece in pieces:
            for values, weights in _terms(addends, piece):
                largest[piece.leaf] = np.maximum(largest[piece.leaf], (magnitudes(values) * weights).max())
        return largest

    def _part(
        self,
        addends: Addends,
        on_gpu: DeviceSum | None,
        largest: np.ndarray,
        owner: int,
        here: int,
        pack: Pack,
    ) -> np.ndarray:
        """What an owner gets: sums, or magnitudes and the clients' entries, group by group; rank 0 packed rows too."""
        slices, entries = self.slices, self.slices.entries
        part = np.empty(int(slices.sent_by(here)[owner]), np.uint8)
        end = len(part) - (int(slices.gathered[here]) if owner == 0 else 0)
        pack(part[end:])
        start, stop = slices.slice(owner)
        pieces = entries.pieces(start, stop)
        if slices.sums[here]:
            total, shifts = part[:end].view(np.int64), self._shifts(largest)
            total[:] = 0 if on_gpu is None else on_gpu.total(shifts)[start:stop]
            for piece in pieces:
                add_fixed(entries.cut(total, piece, start), _terms(addends, piece), shifts[piece.leaf])
        elif end:
            part[: slices.head].view(np.float64)[:] = largest[: slices.head]
            body = part[slices.head : end].reshape(int(slices.participants[here]), -1)
            for piece in pieces:
                np.concatenate([values for values, _ in _terms(addends, piece)], out=entries.cut_bytes(body, piece))
        return part

    def _writer(
        self,
        addends: Addends,
        on_gpu: DeviceSum | None,
        largest: np.ndarray,
        received: dict[int, np.ndarray],
        here: int,
    ) -> Write:
        """What folds pieces of this rank's slice, of which the other ranks have sent it entries or sums."""
        slices, entries, (start, stop) = self.slices, self.slices.entries, self.slices.slice(here)
        sums: list[np.ndarray] = []
        for rank, part in received.items() if stop > start else ():
            if slices.sums[rank]:
                sums.append(part[: _WORD * (stop - start)].view(np.int64))
                continue
            weights = self._weights(np.concatenate(self.assigned[rank]))
            end = slices.head + weights.shape[1] * int(slices.slice_bytes[here])
            rows = part[slices.head : end].reshape(weights.shape[1], -1)
            addends = [*addends, (weights, partial(entries.cut_bytes, rows))]
            if slices.head:
                largest = np.maximum(largest, part[: slices.head].view(np.float64))
            elif not slices.sums.any():  # this rank has all entries
                largest = np.maximum(largest, self._largest(addends[-1:], entries.pieces(start, stop)))
        shifts = self._shifts(largest)
        if on_gpu:
            sums.append(on_gpu.total(shifts)[start:stop])

        def write(piece: Piece, out: np.ndarray) -> None:
            fixed = [entries.cut(total, piece, start) for total in sums]
            fold_exactly(_terms(addends, piece), fixed, shifts[piece.leaf], self._divisors[piece.leaf], out)

        return write

    def _finished(self, transport: Transport, write: Write) -> Messages | None:
        """Write this rank's slice; the slices of all on rank 0, None on the others."""
        entries, finished = self.slices.entries, self.slices.finished
        pieces = entries.pieces(*self.slices.slice(transport.rank))
        if transport.rank != 0:
            buffer = np.empty(finished[transport.rank], np.uint8)
            for piece in pieces:
                write(piece, entries.cut_bytes(buffer, piece))
            if any(finished):
                transport.gather(buffer, finished)
            return None
        leaves = [torch.empty(leaf.shape, dtype=leaf.dtype) for leaf in entries.like]
        flat = [to_numpy(leaf.view(-1)) for leaf in leaves]
        for piece in pieces:
            write(piece, flat[piece.leaf][piece.start : piece.stop])
        if any(finished):
            buffers = transport.gather(NOTHING, finished) or []
            for rank in np.flatnonzero(finished).tolist():
                for piece in entries.pieces(*self.slices.slice(rank)):
                    flat[piece.leaf][piece.start : piece.stop] = entries.cut_bytes(buffers[rank], piece)
        return tree.unflatten(dict(zip(entries.paths, leaves, strict=True)))  # type: ignore[return-value]

    def _shifts(self, largest: np.ndarray) -> list[int]:
        shifts: list[int] = common_shift(largest, int(self.slices.participants.sum())).tolist()
        return shifts

    def _weights(self, clients: np.ndarray) -> np.ndarray:
        """[M, m] float64, the weight of each client in the sum of each leaf."""
        first = (clients == self._participants[0]).astype(np.float64)
        rows = {"samples": self.declared.num_train[clients].astype(np.float64), "first": first}
        once = np.ones(len(clients))
        weights = [rows.get(weighting, once) for weighting in self._weightings]
        return np.array(weights).reshape(len(weights), len(clients))

    @cached_property
    def _divisors(self) -> list[float]:
        """[M] what the sum of each leaf is divided by."""
        totals = self._weights(self._participants).sum(1).tolist()
        return [1.0 if how == "sum" else total for how, total in zip(self._weightings, totals, strict=True)]

    @cached_property
    def _weightings(self) -> list[str]:
        """[M] by what clients count in each leaf; of what is not floating a mean is the first participant's."""
        entries = self.slices.entries
        kinds = [self.declared.folded[path.split("/")[0]] for path in entries.paths]
        return [
            "sum" if not isinstance(kind, Mean) else kind.by if leaf.is_floating_point() else "first"
            for kind, leaf in zip(kinds, entries.like, strict=True)
        ]

    @cached_property
    def _participants(self) -> np.ndarray:
        return clients_of_all(self.assigned)


def _values(leaves: list[np.ndarray], piece: Piece) -> np.ndarray:
    """The values [m, n] of a piece, of leaves [m, ...]."""
    return leaves[piece.leaf][:, piece.start : piece.stop]


def _terms(addends: Addends, piece: Piece) -> list[Terms]:
    return [(values(piece), weights[piece.leaf]) for weights, values in addends]
