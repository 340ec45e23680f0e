"""The exact sum of messages on a GPU, by the operations of `exact` and so with the same bits as on the host.

Messages stay on GPUs, also between ranks: only what rank 0 needs for the server's state goes to its host.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.messages.exact import Addends
from pflmpi.messages.kinds import Messages, as_messages
from pflmpi.messages.slices import Entries, Piece

_ENTRIES = 2**22  # at a time; they take some 140 MB of a GPU

Terms = tuple[Sequence[Tensor], Tensor]  # values [m, n] of groups of clients, and the weights of all of them, float64


@dataclass(frozen=True)
class OnDevice:
    """Adds on a GPU; see `OnHost`. Values on the host are copied there some columns at a time."""

    device: torch.device

    def empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def to_host(self, part: Tensor) -> np.ndarray:
        pinned = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
        return pinned.copy_(part).numpy()

    def words(self, part: Tensor) -> Tensor:
        return part.view(torch.int64)

    def put(self, part: Tensor, content: np.ndarray) -> None:
        part.copy_(torch.from_numpy(content))

    def addends(self, groups: Sequence[Sequence[Tensor]], weights: Sequence[np.ndarray]) -> Addends:
        all_weights = torch.from_numpy(np.concatenate(weights, axis=1)).to(self.device)  # one operation for all groups
        return [(all_weights, lambda piece: [leaves[piece.leaf][:, piece.start : piece.stop] for leaves in groups])]

    def received(self, entries: Entries, rows: Tensor, weights: np.ndarray) -> Addends:
        def values(piece: Piece) -> list[Tensor]:
            packed: Tensor = entries.cut_bytes(rows, piece)
            return [packed.clone(memory_format=torch.contiguous_format).view(entries.like[piece.leaf].dtype)]

        return [(torch.from_numpy(weights).to(self.device), values)]

    def largest(self, pieces: Sequence[Sequence[Terms]]) -> np.ndarray:
        return torch.stack([self._largest(terms) for terms in pieces]).cpu().numpy()

    def join(self, values: Sequence[Sequence[Tensor]], out: Tensor) -> None:
        groups = [group.to(self.device) for of_some in values for group in of_some]
        out.copy_(torch.cat(groups).view(torch.uint8))

    def add(self, out: Tensor, terms: Sequence[Terms], shift: int) -> None:
        out.copy_(self._sum(terms, [], shift))

    def finish(
        self,
        terms: Sequence[Terms],
        sums: Sequence[Tensor],
        shift: int,
        divisor: float,
        dtype: torch.dtype,
        out: Tensor,
    ) -> None:
        total = self._sum(terms, sums, shift)
        if dtype.is_floating_point:
            # Divided by a Python number, CUDA multiplies with its reciprocal, which is rounded.
            total = total.double() / torch.full((), divisor * 2.0**shift, dtype=torch.float64, device=self.device)
        out.copy_(total.to(dtype).view(torch.uint8))

    def _largest(self, terms: Sequence[Terms]) -> Tensor:
        """Returns the largest magnitude times the weight of its client, float64; not finite if a value is not."""
        largest = torch.zeros((), dtype=torch.float64, device=self.device)
        for values, weights in terms:
            for block in self._blocks(values):
                lowest, highest = block.aminmax(dim=1)
                largest_of_block = torch.maximum(highest.double(), -lowest.double()).mul_(weights).amax()
                largest = torch.maximum(largest, largest_of_block)
        return largest

    def _sum(self, terms: Sequence[Terms], sums: Sequence[Tensor], shift: int) -> Tensor:
        """Returns the int64 sum [n] of values times weights, each rounded to nearest even, and of earlier sums."""
        addends = [*sums]
        for values, weights in terms:
            addends.append(_concatenate([_scaled(block, weights, shift).sum(0) for block in self._blocks(values)]))
        return reduce(torch.add, addends)

    def _blocks(self, values: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yields the values [m, w] of all groups, some columns at a time."""
        count, width = values[0].shape[1], max(1, _ENTRIES // sum(map(len, values)))
        for start in range(0, count, width):
            yield _concatenate([group[:, start : start + width].to(self.device) for group in values])


def _scaled(block: Tensor, weights: Tensor, shift: int) -> Tensor:
    """Returns int64 [m, w], values times the weights [m] of clients, as multiples of 2**-shift; integers are exact."""
    if not block.is_floating_point():
        return block.long() * weights.long().unsqueeze(1)
    return torch.mul(block, (weights * 2.0**shift).unsqueeze(1)).round_().long()


def _concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates parts; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def messages_to_host(messages: Messages) -> Messages:
    if all(leaf.is_cpu for _, leaf in tree.leaves({**messages})):
        return messages
    return as_messages(tree.to_host({**messages}))
