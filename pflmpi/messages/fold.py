"""The participants' messages become their sums and means on rank 0, with the same bits on any number of ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.messages.declared import Declared
from pflmpi.messages.device_sum import DeviceSum, is_on_host, on_host
from pflmpi.messages.exact import Terms, add_fixed, common_shift, fold_exactly, magnitudes
from pflmpi.messages.groups import ClientGroup, clients_of, clients_of_all
from pflmpi.messages.kinds import Mean, Messages, Sum, Updates
from pflmpi.messages.packing import NOTHING, to_numpy
from pflmpi.messages.slices import Piece, Slices
from pflmpi.transports.base import Transport

Values = list[tuple[ClientGroup, list[np.ndarray]]]  # of each group, its clients [m] and their values [m, n] by leaf
_WORD = 8  # bytes of an int64
Pack = Callable[[np.ndarray], None]  # writes the bytes of the messages here that rank 0 gathers
Write = Callable[[Piece, np.ndarray], None]  # what is folded of a piece to an array


@dataclass(frozen=True)
class Fold:
    """What is folded, and where.

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
        here, slices, traffic = transport.rank, self.slices, self.slices.traffic
        on_host, on_gpu = self._split(ups, here)
        rows = self._rows(on_host)
        largest = self._largest(rows, on_gpu)
        if slices.sums.any():
            largest = transport.maximum(largest)
        parts = {
            rank: self._part(rows, on_gpu, largest, rank, here, pack)
            for rank in np.flatnonzero(slices.sent_by(here)).tolist()
            if rank != here
        }
        received: dict[int, np.ndarray] = {}
        if traffic.moved:
            sizes = slices.received_by(here)
            others = {int(rank): int(sizes[rank]) for rank in np.flatnonzero(sizes) if rank != here}
            received = transport.exchange(parts, others, traffic.moved)
        folded = self._finished(transport, self._writer(rows, on_gpu, largest, received, here))
        if folded is None:
            return None, []
        gathered = slices.gathered.tolist()
        packed = [received[rank][-size:] if rank and size else NOTHING for rank, size in enumerate(gathered)]
        return folded, packed

    def _split(self, ups: Updates, rank: int) -> tuple[Updates, DeviceSum | None]:
        """The messages on the host, and those on the GPU; all on the host where other ranks get them as they are."""
        folded = [(clients, {name: messages[name] for name in self.declared.folded}) for clients, messages in ups]
        if not self.slices.sums[rank] and any(owner != rank for owner in np.flatnonzero(self.slices.widths)):
            return [(clients, on_host(messages)) for clients, messages in folded], None
        here = [(clients, messages) for clients, messages in folded if is_on_host(messages)]
        there = [(clients, self._leaves(messages)) for clients, messages in folded if not is_on_host(messages)]
        if not there:
            return here, None
        clients = np.concatenate([ids for ids, _ in there])
        weights = np.stack([self._weights(leaf, clients) for leaf in range(len(self.slices.entries.paths))])
        return here, DeviceSum([leaves for _, leaves in there], weights)

    def _writer(
        self, rows: Values, on_gpu: DeviceSum | None, largest: np.ndarray, received: dict[int, np.ndarray], here: int
    ) -> Write:
        """What folds pieces of this rank's slice, of which the other ranks have sent it entries or sums."""
        slices, entries, (start, stop) = self.slices, self.slices.entries, self.slices.slice(here)
        entered: list[tuple[np.ndarray, np.ndarray]] = []
        summed: list[np.ndarray] = []
        for rank, part in received.items() if stop > start else ():
            if slices.sums[rank]:
                summed.append(part[: _WORD * (stop - start)].view(np.int64))
            else:
                clients, size = clients_of(self.assigned[rank]), int(slices.slice_bytes[here])
                body = part[slices.head : slices.head + size * len(clients)]
                entered.append((clients, body.reshape(len(clients), -1)))
                if slices.head:
                    largest = np.maximum(largest, part[: slices.head].view(np.float64))
                elif not slices.sums.any():  # this rank has all entries
                    for piece in entries.pieces(start, stop):
                        magnitude = self._magnitude(clients, piece.leaf, entries.cut_bytes(entered[-1][1], piece))
                        largest[piece.leaf] = np.maximum(largest[piece.leaf], magnitude)
        shifts = self._shifts(largest)
        if on_gpu:
            summed.append(on_gpu.total(shifts)[start:stop])

        def write(piece: Piece, out: np.ndarray) -> None:
            terms = self._terms(rows, piece)
            for clients, sent in entered:
                terms.append((entries.cut_bytes(sent, piece), self._weights(piece.leaf, clients)))
            sums = [entries.cut(fixed, piece, start) for fixed in summed]
            fold_exactly(terms, sums, shifts[piece.leaf], self._divisor(piece.leaf), out)

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

    def _total(self, rows: Values, on_gpu: DeviceSum | None, largest: np.ndarray, start: int, stop: int) -> np.ndarray:
        """int64 sums of a slice, over the participants here."""
        entries, shifts = self.slices.entries, self._shifts(largest)
        total = np.zeros(stop - start, np.int64) if on_gpu is None else on_gpu.total(shifts)[start:stop].copy()
        for piece in entries.pieces(start, stop):
            add_fixed(entries.cut(total, piece, start), self._terms(rows, piece), shifts[piece.leaf])
        return total

    def _part(
        self,
        rows: Values,
        on_gpu: DeviceSum | None,
        largest: np.ndarray,
        owner: int,
        here: int,
        pack: Pack,
    ) -> np.ndarray:
        """What an owner gets: sums, or magnitudes and the participants' entries, one by one; rank 0 packed rows too."""
        slices, entries = self.slices, self.slices.entries
        part = np.empty(int(slices.sent_by(here)[owner]), np.uint8)
        end = len(part) - (int(slices.gathered[here]) if owner == 0 else 0)
        pack(part[end:])
        if slices.sums[here]:
            part[:end].view(np.int64)[:] = self._total(rows, on_gpu, largest, *slices.slice(owner))
        elif end:
            clients, pieces = np.sort(np.concatenate([ids for ids, _ in rows])), entries.pieces(*slices.slice(owner))
            part[: slices.head].view(np.float64)[:] = largest[: slices.head]
            body = part[slices.head : end].reshape(len(clients), -1)
            for ids, values in rows:
                for row, at in enumerate(np.searchsorted(clients, ids).tolist()):
                    for piece in pieces:
                        entries.cut_bytes(body[at], piece)[:] = values[piece.leaf][row, piece.start : piece.stop]
        return part

    def _rows(self, ups: Updates) -> Values:
        return [
            (clients, [to_numpy(tree.flat_rows(leaf)) for leaf in self._leaves(messages)]) for clients, messages in ups
        ]

    def _terms(self, rows: Values, piece: Piece) -> list[Terms]:
        return [
            (values[piece.leaf][:, piece.start : piece.stop], self._weights(piece.leaf, clients))
            for clients, values in rows
        ]

    def _largest(self, rows: Values, on_gpu: DeviceSum | None) -> np.ndarray:
        """[M] the largest magnitude in each leaf of the participants here, times their weights."""
        largest = np.zeros(len(self.slices.entries.paths)) if on_gpu is None else on_gpu.largest()
        for clients, leaves in rows:
            magnitudes_here = [self._magnitude(clients, leaf, values) for leaf, values in enumerate(leaves)]
            largest = np.maximum(largest, magnitudes_here)
        return largest

    def _magnitude(self, clients: np.ndarray, leaf: int, values: np.ndarray) -> float:
        """The largest magnitude in the values [m, n] of a leaf of some clients, times their weights."""
        return float((magnitudes(values) * self._weights(leaf, clients)).max())

    def _leaves(self, messages: Messages) -> list[Tensor]:
        return [leaf for _, leaf in tree.leaves({**messages})]

    def _shifts(self, largest: np.ndarray) -> list[int]:
        shifts: list[int] = common_shift(largest, int(self.slices.participants.sum())).tolist()
        return shifts

    def _weights(self, leaf: int, clients: np.ndarray) -> np.ndarray:
        kind = self._kind(leaf)
        if isinstance(kind, Mean) and not self.slices.entries.like[leaf].is_floating_point():
            return np.where(clients == self._participants.min(), 1.0, 0.0)
        samples = isinstance(kind, Mean) and kind.by == "samples"
        return self.declared.num_train[clients].astype(np.float64) if samples else np.ones(len(clients))

    def _divisor(self, leaf: int) -> float:
        """What the sum of a leaf is divided by."""
        if not isinstance(self._kind(leaf), Mean):
            return 1.0
        return float(self._weights(leaf, self._participants).sum())

    @cached_property
    def _participants(self) -> np.ndarray:
        return clients_of_all(self.assigned)

    def _kind(self, leaf: int) -> Sum:
        return self.declared.folded[self.slices.entries.paths[leaf].split("/")[0]]
