"""The memory of tensors that may overlap, and a copy of it with tensors that overlap alike."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pflmpi.tree import ALIGNED


@dataclass(frozen=True)
class Stretch:
    """Tensors that overlap in memory, as a weight and its transpose do: one stretch of it.

    Attributes:
        flat: [n] all of it.
        places: of the tensors in the list, each with the place in `flat` where it begins.
        key: what a copy must have in common with it.
        mixed: whether the tensors are of several types.
    """

    flat: Tensor
    places: tuple[tuple[int, int], ...]
    key: Hashable
    mixed: bool


def stretches(values: Sequence[Any]) -> list[Stretch]:
    """The memory of the tensors in a list, which may have other values too."""
    extents: list[tuple[int, int, int, int]] = []  # storage, first byte, end, place
    for place, one in enumerate(values):
        if isinstance(one, Tensor):
            begin = int(one.storage_offset()) * one.element_size()
            extents.append((one.untyped_storage()._cdata, begin, begin + _span(one) * one.element_size(), place))
    found: list[list[tuple[int, int, int, int]]] = []
    reach = 0
    for extent in sorted(extents):
        if found and extent[0] == found[-1][0][0] and extent[1] < reach:
            found[-1].append(extent)
        else:
            found.append([extent])
            reach = 0
        reach = max(reach, extent[2])
    stretched = [_stretch(values, members) for members in found]
    return sorted(stretched, key=lambda one: one.places)  # not by address, which is another one each time


def copy_of(memory: Sequence[Stretch], values: Sequence[Any]) -> tuple[list[Tensor], list[Any]]:
    """Other memory, not yet filled, like `flat` of each stretch, and the list with its tensors there."""
    flat, own = [], list(values)
    for stretch in memory:
        offset = stretch.flat.storage_offset() % (ALIGNED // stretch.flat.element_size())
        buffer = torch.empty(offset + len(stretch.flat), dtype=stretch.flat.dtype, device=stretch.flat.device)
        flat.append(buffer[offset:])
        for place, begin in stretch.places:
            one = values[place]
            own[place] = buffer.as_strided(one.shape, one.stride(), offset + begin)
    return flat, own


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors of one layout, those of a type in one call."""
    for dtype in dict.fromkeys(one.dtype for one in targets):
        pairs = [pair for pair in zip(targets, sources, strict=True) if pair[0].dtype == dtype]
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def same_bits(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether tensors of one layout have the same bits; waits for the device."""
    pairs = zip(some, others, strict=True)
    equal = [(one.view(torch.uint8) == other.view(torch.uint8)).all() for one, other in pairs]
    return not equal or bool(torch.stack(equal).all())


def _stretch(values: Sequence[Any], members: list[tuple[int, int, int, int]]) -> Stretch:
    first, begin, end = values[members[0][3]], members[0][1], max(end for _, _, end, _ in members)
    size = first.element_size()
    places = tuple(sorted((place, (start - begin) // size) for _, start, _, place in members))
    flat = first.as_strided(((end - begin) // size,), (1,), begin // size)
    layouts = tuple((values[place].dtype, values[place].shape, values[place].stride()) for place, _ in places)
    mixed = len({dtype for dtype, _, _ in layouts}) > 1
    return Stretch(flat, places, (places, layouts, flat.device, begin % ALIGNED), mixed)


def _span(tensor: Tensor) -> int:
    """Entries of memory from a tensor's first to its last."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
