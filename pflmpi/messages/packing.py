"""Packs trees into one buffer of bytes and back, by a template that both sides know."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.tree import Tree

NOTHING = np.empty(0, np.uint8)  # the message to a rank that gets none
ALIGNED = 16  # bytes, the least alignment of NumPy's memory

NUMPY_TYPES: dict[torch.dtype, np.dtype[Any]] = {  # of all leaves that can be sent and stored
    torch.float32: np.dtype("f4"),
    torch.float64: np.dtype("f8"),
    torch.int32: np.dtype("i4"),
    torch.int64: np.dtype("i8"),
    torch.uint8: np.dtype("u1"),
    torch.bool: np.dtype("?"),
}


def to_numpy(leaf: Tensor) -> np.ndarray:
    return leaf.detach().contiguous().cpu().numpy()


def numpy_type(leaf: Tensor) -> np.dtype[Any]:
    return NUMPY_TYPES[leaf.dtype]


def pack(value: Tree, empty: Callable[[int], np.ndarray] | None = None) -> np.ndarray:
    """Packs all leaves of a tree, in sorted order of their paths, into one uint8 array.

    Args:
        empty: allocates that array, given its bytes; None for NumPy's memory.
    """
    parts = [to_numpy(leaf).reshape(-1).view(np.uint8) for _, leaf in tree.leaves(value)]
    if not parts:
        return NOTHING
    return np.concatenate(parts, out=None if empty is None else empty(sum(map(len, parts))))


def unpack(buffer: np.ndarray, like: Tree) -> Tree:
    """Unpacks a tree shaped `like`; its leaves must not be modified, as most share the buffer's memory."""
    flat, offset = {}, 0
    for path, leaf in tree.leaves(like):
        size = leaf.nbytes
        values = buffer[offset : offset + size]
        # Unaligned memory would change the bits of some kernels.
        values = values if values.ctypes.data % ALIGNED == 0 else values.copy()
        flat[path] = torch.from_numpy(values.view(numpy_type(leaf))).reshape(leaf.shape)
        offset += size
    assert offset == len(buffer), f"buffer of {len(buffer)} bytes, template of {offset}"
    return tree.unflatten(flat)


def unpack_there(buffer: Tensor, like: Tree) -> Tree:
    """As `unpack`, for bytes [M] on a device, where they stay; all leaves are copied in one operation."""
    leaves, parts, offset = dict(tree.leaves(like)), dict[str, Tensor](), 0
    for path, leaf in leaves.items():
        size = leaf.nbytes
        parts[path] = buffer[offset : offset + size]
        offset += size
    copies = dict(tree.leaves(tree.clone({**parts})))
    return tree.unflatten({path: copies[path].view(leaf.dtype).view(leaf.shape) for path, leaf in leaves.items()})
