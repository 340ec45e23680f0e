"""The sum over clients that does not depend on their order, nor on ranks.

Float addition is not associative, so a tree reduction over ranks would change bits with the number of ranks. Integers
are: every value becomes a multiple of one common power of two, small enough that no sum overflows.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.messages.declared import Declared
from pflmpi.messages.groups import ClientGroup
from pflmpi.messages.kinds import Mean, Messages, Sum
from pflmpi.messages.packing import to_numpy
from pflmpi.transports.base import Transport
from pflmpi.tree import Tree

_BITS = 62
_BLOCK = 2**16  # entries of a leaf at a time


def common_shift(largest: np.ndarray, terms: int) -> np.ndarray:
    """The power of two that makes `terms` values of at most `largest` fit an int64 sum.

    Args:
        largest: [M] float64, the largest magnitude per leaf over all participants; not finite is refused before.
        terms: the number of participants, over all ranks.
    """
    _, exponent = np.frexp(largest)
    shift: np.ndarray = _BITS - int(np.ceil(np.log2(max(terms, 2)))) - exponent.astype(np.int64)
    return shift


def to_fixed(values: np.ndarray, shift: int) -> np.ndarray:
    """`values` (float64, overwritten) as int64 multiples of 2**-shift, rounded to nearest even."""
    values *= 2.0**shift  # exact
    fixed: np.ndarray = np.rint(values, out=values).astype(np.int64)
    return fixed


def add_fixed(total: np.ndarray, values: np.ndarray, weight: float, shift: int) -> None:
    """Add `values` times a weight to int64 sums of multiples of 2**-shift; in blocks that stay in the cache."""
    for block in _blocks(len(values)):
        total[block] += to_fixed(values[block].astype(np.float64) * weight, shift)


def from_fixed(values: np.ndarray, shift: int) -> np.ndarray:
    """The float64 values of int64 multiples of 2**-shift."""
    floats: np.ndarray = values.astype(np.float64) * 2.0**-shift
    return floats


def fold(
    transport: Transport,
    declared: Declared,
    kinds: dict[str, Sum],
    ups: list[tuple[ClientGroup, Messages]],
    participants: np.ndarray,
) -> Messages | None:
    """The sums and means of the participants' messages on rank 0, None on the others; the same bits on any ranks.

    Args:
        kinds: the messages to fold, by name.
        ups: for each group computed here, the clients and their messages with a leading client axis.
        participants: [P] ascending ids, over all ranks.
    """
    template: Tree = {name: kind.like for name, kind in kinds.items()}
    paths = [(path, leaf) for path, leaf in tree.leaves(template)]
    largest = np.zeros(len(paths))
    for clients, messages in ups:
        values = dict(tree.leaves({name: messages[name] for name in kinds}))
        for i, (path, _) in enumerate(paths):
            each = magnitudes(values[path]) * _weights(kinds[_name(path)], declared, clients)
            largest[i] = max(largest[i], each.max())
    with transport.channel("data"):
        largest = transport.maximum(largest)
    shifts = common_shift(largest, len(participants)).tolist()
    total = np.zeros(sum(leaf.numel() for _, leaf in paths), np.int64)
    for clients, messages in ups:
        values, offset = dict(tree.leaves({name: messages[name] for name in kinds})), 0
        for (path, leaf), shift in zip(paths, shifts, strict=True):
            weights = _weights(kinds[_name(path)], declared, clients)
            for row, weight in zip(to_numpy(tree.flat_rows(values[path])), weights.tolist(), strict=True):
                add_fixed(total[offset : offset + leaf.numel()], row, weight, shift)
            offset += leaf.numel()
    with transport.channel("data"):
        summed = transport.sum_int64(total)
    if summed is None:
        return None
    flat, offset = {}, 0
    for (path, leaf), shift in zip(paths, shifts, strict=True):
        kind, fixed = kinds[_name(path)], summed[offset : offset + leaf.numel()]
        terms = _weights(kind, declared, participants).sum() if isinstance(kind, Mean) else 1.0
        folded = torch.empty(leaf.numel(), dtype=leaf.dtype)
        for block in _blocks(leaf.numel()):
            folded[block] = torch.from_numpy(from_fixed(fixed[block], shift) / terms)
        flat[path] = folded.reshape(leaf.shape)
        offset += leaf.numel()
    return tree.unflatten(flat)  # type: ignore[return-value]


def magnitudes(leaf: Tensor) -> np.ndarray:
    """[m] float64, the largest magnitude in each row of a leaf [m, ...]; not finite where a value is not."""
    rows = to_numpy(tree.flat_rows(leaf))
    with np.errstate(invalid="ignore"):  # NaN is an answer
        highest, lowest = rows.max(1, initial=0).astype(np.float64), rows.min(1, initial=0).astype(np.float64)
    found: np.ndarray = np.maximum(highest, -lowest)
    return found


def _blocks(count: int) -> Iterator[slice]:
    return (slice(start, start + _BLOCK) for start in range(0, count, _BLOCK))


def _name(path: str) -> str:
    return path.split("/")[0]


def _weights(kind: Sum, declared: Declared, clients: np.ndarray) -> np.ndarray:
    samples = isinstance(kind, Mean) and kind.by == "samples"
    return declared.num_train[clients].astype(np.float64) if samples else np.ones(len(clients))
