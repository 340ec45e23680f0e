"""The exact sum of the messages that are on a GPU, by the operations of `exact`, so with the bits of the host's.

Only the sum goes to the host: a model, where the messages of many clients are as many models.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.messages.kinds import Messages, as_messages

_ENTRIES = 2**22  # at a time: some 140 MB of a GPU


class DeviceSum:
    """Messages of clients that are on one device.

    Args:
        groups: of each group of clients, the leaves [m, ...].
        weights: [M, P] float64 of each leaf, those of the clients of all groups.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]], weights: np.ndarray) -> None:
        self._leaves = [[*map(tree.flat_rows, parts)] for parts in zip(*groups, strict=True)]
        self._weights = weights
        self._totals: dict[tuple[int, ...], np.ndarray] = {}

    def largest(self) -> np.ndarray:
        """[M] float64, the largest magnitude in each leaf, times the weights; not finite where a value is not."""
        magnitudes = torch.stack([_magnitudes(rows) for rows in self._leaves])
        largest: np.ndarray = (magnitudes.cpu().numpy() * self._weights).max(1)
        return largest

    def total(self, shifts: Sequence[int]) -> np.ndarray:
        """[n] int64 sums of all leaves, one after another, in multiples of 2**-shift of each leaf; computed once."""
        key = tuple(shifts)
        if key not in self._totals:
            self._totals[key] = self._sum(shifts)
        return self._totals[key]

    def _sum(self, shifts: Sequence[int]) -> np.ndarray:
        device = self._leaves[0][0].device
        factors = torch.from_numpy(np.ldexp(self._weights, np.array(shifts)[:, np.newaxis])).to(device)
        sums = [_sum_fixed(rows, factor) for rows, factor in zip(self._leaves, factors.unsqueeze(2), strict=True)]
        total = torch.cat(sums)
        summed: np.ndarray = torch.empty(total.shape, dtype=total.dtype, pin_memory=total.is_cuda).copy_(total).numpy()
        return summed


def is_on_host(messages: Messages) -> bool:
    """Whether all leaves are in the memory of the host."""
    return all(leaf.is_cpu for _, leaf in tree.leaves({**messages}))


def on_host(messages: Messages) -> Messages:
    """The messages with all leaves on the host."""
    if is_on_host(messages):
        return messages
    return as_messages(tree.to_host({**messages}))


def _magnitudes(rows: Sequence[Tensor]) -> Tensor:
    """[P] float64, the largest magnitude in each row."""
    largest = torch.zeros(sum(map(len, rows)), dtype=torch.float64, device=rows[0].device)
    for block in _blocks(rows) if rows[0].shape[1] else ():
        lowest, highest = block.aminmax(dim=1)
        largest = torch.maximum(largest, torch.maximum(highest.double(), -lowest.double()))
    return largest


def _sum_fixed(rows: Sequence[Tensor], factors: Tensor) -> Tensor:
    """[n] int64 sum of the rows times factors [P, 1], each rounded to nearest even."""
    return torch.cat([block.double().mul_(factors).round_().long().sum(0) for block in _blocks(rows)])


def _blocks(rows: Sequence[Tensor]) -> Iterator[Tensor]:
    """The rows [P, w] of all groups, some columns at a time."""
    count, width = rows[0].shape[1], max(1, _ENTRIES // sum(map(len, rows)))
    for start in range(0, max(count, 1), width):
        yield torch.cat([group[:, start : start + width] for group in rows])
