"""The participants' messages become their sums and means on rank 0, with the same bits on any number of ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.messages.declared import Declared
from pflmpi.messages.entries import Piece
from pflmpi.messages.folding.exact import Terms, add_fixed, common_shift, finish, fold_exactly, magnitudes
from pflmpi.messages.folding.on_device import DeviceSum, is_on_host, on_host
from pflmpi.messages.folding.routes import Route
from pflmpi.messages.groups import ClientGroup, clients_of, clients_of_all
from pflmpi.messages.kinds import Mean, Messages, Sum, Updates
from pflmpi.messages.packing import NOTHING, to_numpy
from pflmpi.transports.base import Transport

Values = list[tuple[ClientGroup, list[np.ndarray]]]  # of each group, its clients [m] and their values [m, n] by leaf
Write = Callable[[Piece, np.ndarray], None]  # what is folded of a piece to an array


@dataclass(frozen=True)
class Fold:
    """What is folded, and which way.

    Attributes:
        kinds: the messages, by name.
        assigned: the groups of participants of each rank.
    """

    declared: Declared
    kinds: dict[str, Sum]
    route: Route
    assigned: list[list[ClientGroup]]

    def over(self, transport: Transport, ups: Updates) -> Messages | None:
        """The sums and means on rank 0, None on the others.

        Args:
            ups: of the groups computed here, on the host or on the GPU; if messages are gathered, all on rank 0, which
                calls this alone.
        """
        with transport.channel("data"):
            way = self._from_sum if self.route.way == "sum" else self._from_parts
            return self._finished(transport, way(transport, *self._split(ups, transport.rank)))

    def _split(self, ups: Updates, rank: int) -> tuple[Updates, DeviceSum | None]:
        """The messages on the host, and those on the GPU; all on the host where other ranks get them as they are."""
        mine = [(clients, {name: messages[name] for name in self.kinds}) for clients, messages in ups]
        if not self.route.sums[rank] and any(owner != rank for owner in self.route.exchanged.sent_by(rank)):
            return [(clients, on_host(messages)) for clients, messages in mine], None
        here = [(clients, messages) for clients, messages in mine if is_on_host(messages)]
        there = [(clients, self._leaves(messages)) for clients, messages in mine if not is_on_host(messages)]
        if not there:
            return here, None
        clients = np.concatenate([ids for ids, _ in there])
        weights = np.stack([self._weights(leaf, clients) for leaf in range(len(self.route.entries.paths))])
        return here, DeviceSum([leaves for _, leaves in there], weights)

    def _from_parts(self, transport: Transport, ups: Updates, on_gpu: DeviceSum | None) -> Write:
        """What folds pieces of this rank's slice, of which the other ranks have sent it entries or sums."""
        route, entries, exchanged = self.route, self.route.entries, self.route.exchanged
        rows, largest, head = self._rows(ups), self._largest(ups, on_gpu), route.head
        if route.sums.any():
            largest = transport.maximum(largest)
        entered: list[tuple[np.ndarray, np.ndarray]] = []
        summed: list[np.ndarray] = []
        if exchanged.moved:
            here = transport.rank
            sums, owners = bool(route.sums[here]), (rank for rank in exchanged.sent_by(here) if rank != here)
            parts = {rank: self._part(rows, on_gpu, largest, rank, sums) for rank in owners}
            sizes = {rank: size for rank, size in exchanged.received_by(here).items() if rank != here}
            for rank, part in transport.all_to_all(parts, sizes, exchanged.moved).items():
                if route.sums[rank]:
                    summed.append(part.view(np.int64))
                else:
                    clients = clients_of(self.assigned[rank])
                    entered.append((clients, part[head:].reshape(len(clients), -1)))
                    if head:
                        largest = np.maximum(largest, part[:head].view(np.float64))
        shifts, (start, stop) = self._shifts(largest), route.slice(transport.rank)
        if on_gpu:
            summed.append(on_gpu.total(shifts)[start:stop])

        def write(piece: Piece, out: np.ndarray) -> None:
            terms = self._terms(rows, piece)
            for clients, sent in entered:
                terms.append((entries.cut_bytes(sent, piece), self._weights(piece.leaf, clients)))
            sums = [entries.cut(each, piece, start) for each in summed]
            fold_exactly(terms, sums, shifts[piece.leaf], self._divisor(piece.leaf), out)

        return write

    def _from_sum(self, transport: Transport, ups: Updates, on_gpu: DeviceSum | None) -> Write:
        """What finishes pieces on rank 0, which has the sum over all ranks."""
        entries = self.route.entries
        largest = transport.maximum(self._largest(ups, on_gpu))
        total, shifts = self._total(self._rows(ups), on_gpu, largest, 0, entries.count), self._shifts(largest)
        transport.sum_int64(total)

        def write(piece: Piece, out: np.ndarray) -> None:
            finish(entries.cut(total, piece), shifts[piece.leaf], self._divisor(piece.leaf), out)

        return write

    def _finished(self, transport: Transport, write: Write) -> Messages | None:
        """Write this rank's slice; the slices of all on rank 0, None on the others."""
        entries, finished = self.route.entries, self.route.finished
        mine = entries.pieces(*self.route.slice(transport.rank))
        if transport.rank != 0:
            buffer = np.empty(finished[transport.rank], np.uint8)
            for piece in mine:
                write(piece, entries.cut_bytes(buffer, piece))
            if any(finished):
                transport.gather(buffer, finished)
            return None
        leaves = [torch.empty(leaf.shape, dtype=leaf.dtype) for leaf in entries.like]
        flat = [to_numpy(leaf.view(-1)) for leaf in leaves]
        for piece in mine:
            write(piece, flat[piece.leaf][piece.start : piece.stop])
        if any(finished):
            buffers = transport.gather(NOTHING, finished) or []
            for rank in np.flatnonzero(finished).tolist():
                for piece in entries.pieces(*self.route.slice(rank)):
                    flat[piece.leaf][piece.start : piece.stop] = entries.cut_bytes(buffers[rank], piece)
        return tree.unflatten(dict(zip(entries.paths, leaves, strict=True)))  # type: ignore[return-value]

    def _total(self, rows: Values, on_gpu: DeviceSum | None, largest: np.ndarray, start: int, stop: int) -> np.ndarray:
        """int64 sums of a slice, over the participants here."""
        entries, shifts = self.route.entries, self._shifts(largest)
        total = np.zeros(stop - start, np.int64) if on_gpu is None else on_gpu.total(shifts)[start:stop].copy()
        for piece in entries.pieces(start, stop):
            add_fixed(entries.cut(total, piece, start), self._terms(rows, piece), shifts[piece.leaf])
        return total

    def _part(self, rows: Values, on_gpu: DeviceSum | None, largest: np.ndarray, rank: int, sums: bool) -> np.ndarray:
        """What the owner of a slice gets: sums, or largest magnitudes and the participants' entries, one by one."""
        if sums:
            return self._total(rows, on_gpu, largest, *self.route.slice(rank)).view(np.uint8)
        entries, head = self.route.entries, self.route.head
        clients, pieces = np.sort(np.concatenate([ids for ids, _ in rows])), entries.pieces(*self.route.slice(rank))
        part = np.empty(head + len(clients) * int(self.route.slice_bytes[rank]), np.uint8)
        if head:
            part[:head].view(np.float64)[:] = largest
        body = part[head:].reshape(len(clients), -1)
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

    def _largest(self, ups: Updates, on_gpu: DeviceSum | None) -> np.ndarray:
        """[M] the largest magnitude in each leaf of the participants here, times their weights."""
        largest = np.zeros(len(self.route.entries.paths)) if on_gpu is None else on_gpu.largest()
        for clients, messages in ups:
            for i, leaf in enumerate(self._leaves(messages)):
                largest[i] = max(largest[i], (magnitudes(leaf) * self._weights(i, clients)).max())
        return largest

    def _leaves(self, messages: Messages) -> list[Tensor]:
        return [leaf for _, leaf in tree.leaves({**messages})]

    def _shifts(self, largest: np.ndarray) -> list[int]:
        shifts: list[int] = common_shift(largest, int(self.route.participants.sum())).tolist()
        return shifts

    def _weights(self, leaf: int, clients: np.ndarray) -> np.ndarray:
        kind = self._kind(leaf)
        if isinstance(kind, Mean) and not self.route.entries.like[leaf].is_floating_point():
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
        return self.kinds[self.route.entries.paths[leaf].split("/")[0]]
