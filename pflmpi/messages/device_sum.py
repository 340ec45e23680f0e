"""The exact sum of messages on a GPU, by the operations of `exact`, so with the bits of the host's.

They stay there, also from GPU to GPU: only what rank 0 needs for the server's state goes to its host.
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

_ENTRIES = 2**22  # at a time: some 140 MB of a GPU

Terms = tuple[Sequence[Tensor], Tensor]  # values [m, n] of groups of clients, and the weights of all of them, float64


@dataclass(frozen=True)
class OnDevice:
    """Adds on a GPU; see `OnHost`. What is on the host comes there some columns at a time."""

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
        together = torch.from_numpy(np.concatenate(weights, axis=1)).to(self.device)  # few operations for all groups
        return [(together, lambda piece: [leaves[piece.leaf][:, piece.start : piece.stop] for leaves in groups])]

    def received(self, entries: Entries, rows: Tensor, weights: np.ndarray) -> Addends:
        def values(piece: Piece) -> list[Tensor]:
            packed: Tensor = entries.cut_bytes(rows, piece)
            return [packed.clone(memory_format=torch.contiguous_format).view(entries.like[piece.leaf].dtype)]

        return [(torch.from_numpy(weights).to(self.device), values)]

    def largest(self, pieces: Sequence[Sequence[Terms]]) -> np.ndarray:
        found = [self._largest(terms) for terms in pieces]
        return torch.stack(found).cpu().numpy()

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
            # By a number of the host, CUDA multiplies with its reciprocal, which is another number.
            total = total.double() / torch.full((), divisor * 2.0**shift, dtype=torch.float64, device=self.device)
        out.copy_(total.to(dtype).view(torch.uint8))

    def _largest(self, terms: Sequence[Terms]) -> Tensor:
        """float64, the largest magnitude times the weights of its client; not finite where a value is not."""
        found = torch.zeros((), dtype=torch.float64, device=self.device)
        for values, weights in terms:
            for block in self._blocks(values):
                lowest, highest = block.aminmax(dim=1)
                largest = torch.maximum(highest.double(), -lowest.double()).mul_(weights).amax()
                found = torch.maximum(found, largest)
        return found

    def _sum(self, terms: Sequence[Terms], sums: Sequence[Tensor], shift: int) -> Tensor:
        """[n] int64 sum of values times weights, each rounded to nearest even, and of sums."""
        added = [*sums]
        for values, weights in terms:
            added.append(_together([_scaled(block, weights, shift).sum(0) for block in self._blocks(values)]))
        return reduce(torch.add, added)

    def _blocks(self, values: Sequence[Tensor]) -> Iterator[Tensor]:
        """The values [m, w] of all groups, some columns at a time."""
        count, width = values[0].shape[1], max(1, _ENTRIES // sum(map(len, values)))
        for start in range(0, count, width):
            yield _together([group[:, start : start + width].to(self.device) for group in values])


def _scaled(block: Tensor, weights: Tensor, shift: int) -> Tensor:
    """[m, w] int64, values times the weights [m] of their clients, as multiples of 2**-shift; integers are exact."""
    if not block.is_floating_point():
        return block.long() * weights.long().unsqueeze(1)
    return torch.mul(block, (weights * 2.0**shift).unsqueeze(1)).round_().long()


def _together(parts: Sequence[Tensor]) -> Tensor:
    """The parts one behind another; one alone is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def on_host(messages: Messages) -> Messages:
    """The messages with all leaves on the host."""
    if all(leaf.is_cpu for _, leaf in tree.leaves({**messages})):
        return messages
    return as_messages(tree.to_host({**messages}))
