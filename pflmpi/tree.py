"""Trees: nested dicts of tensors with string keys, always walked in sorted order.

A *path* is the keys from the root joined by "/". An empty dict has no leaves, so that it is the same as none.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Union

import torch
from torch import Tensor

from pflmpi.errors import UserError

_OLDEST = "2.10"  # torch, as in setup.cfg; checked here, because everything that computes imports this file
if [int(part) for part in torch.__version__.split(".")[:2]] < [int(part) for part in _OLDEST.split(".")]:
    cure = f"pflmpi needs {_OLDEST} or newer: pip install 'torch>={_OLDEST}'"
    raise UserError(f"torch {torch.__version__} is too old, {cure}")

from pflmpi.vmap_lanes import in_lane  # noqa: E402 (an old torch may lack its imports)

Tree = dict[str, Union[Tensor, "Tree"]]

ALIGNED = 256  # bytes: alignment of CUDA's allocations, by which kernels are chosen


def leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) for every leaf, in sorted order of the keys."""
    for key in sorted(tree):
        value = tree[key]
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from leaves(value, path + "/")
        else:
            yield path, value


def part(tree: Mapping[str, Tensor | Tree], key: str) -> Tree:
    """Subtree of that name."""
    value = tree[key]
    assert isinstance(value, dict), f"{key} is a tensor"
    return value


def leaf(tree: Mapping[str, Tensor | Tree], key: str) -> Tensor:
    """Tensor of that name."""
    value = tree[key]
    assert not isinstance(value, dict), f"{key} is a tree"
    return value


def at(tree: Tree, path: str) -> Tensor:
    """Leaf at a path."""
    *parents, last = path.split("/")
    for key in parents:
        tree = part(tree, key)
    return leaf(tree, last)


def unflatten(flat: dict[str, Tensor]) -> Tree:
    """Tree whose leaves have the given paths; the inverse of `dict(leaves(tree))`."""
    root: Tree = {}
    for path in sorted(flat):
        *parents, last = path.split("/")
        node = root
        for key in parents:
            child = node.setdefault(key, {})
            assert isinstance(child, dict), f"{path}: {key} is a leaf already"
            node = child
        node[last] = flat[path]
    return root


def map(function: Callable[..., Tensor], tree: Tree, *others: Tree) -> Tree:
    """Tree of the same structure with `function` applied leaf by leaf.

    >>> map(lambda a, b: a + b, {"w": torch.ones(2)}, {"w": torch.ones(2)})
    {'w': tensor([2., 2.])}
    """
    result: Tree = {}
    for key in sorted(tree):
        value = tree[key]
        if isinstance(value, dict):
            result[key] = map(function, value, *(other.get(key, {}) for other in others))  # type: ignore[arg-type]
        else:
            result[key] = function(value, *(other[key] for other in others))
    return result


def mix(function: Callable[..., Tensor], own: Tree, *others: Tree) -> Tree:
    """`map` over floating-point leaves; other leaves, such as counters, cannot be averaged and stay those of `own`.

    >>> mix(lambda mine, theirs: mine + theirs, {"n": torch.tensor(1)}, {"n": torch.tensor(9)})
    {'n': tensor(1)}
    """
    return map(lambda mine, *theirs: function(mine, *theirs) if mine.is_floating_point() else mine, own, *others)


def clone(tree: Tree) -> Tree:
    """Copy whose leaves own their memory (and are aligned, which affects bits in some kernels)."""
    old = [leaf for _, leaf in leaves(tree)]
    if any(in_lane(leaf) for leaf in old):
        return map(lambda leaf: leaf.clone(memory_format=torch.contiguous_format), tree)
    new = [torch.empty_like(leaf, memory_format=torch.contiguous_format) for leaf in old]
    if new:
        torch._foreach_copy_(new, old)  # on a GPU in one operation
    filled = iter(new)
    return map(lambda _: next(filled), tree)


def like(tree: Tree) -> Tree:
    """Shapes and dtypes of a tree as tensors without memory (device "meta")."""
    return map(lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"), tree)


def num_bytes(tree: Tree) -> int:
    """Bytes of all leaves."""
    return sum(leaf.nbytes for _, leaf in leaves(tree))


def stack(trees: list[Tree]) -> Tree:
    """Tree whose leaves hold the given trees' leaves along a new first axis."""
    return map(lambda *rows: torch.stack(rows), trees[0], *trees[1:])


def flat_rows(rows: Tensor) -> Tensor:
    """A leaf [m, ...] as [m, n]; single numbers [m] as [m, 1]."""
    return rows.unsqueeze(1).flatten(1)


def row(tree: Tree, index: int) -> Tree:
    """Row `index` of every leaf, as tensors that own their memory."""
    return map(lambda leaf: leaf[index].clone(), tree)


def differences(tree: Tree, other: Tree) -> list[str]:
    """Differences in structure, shape or dtype, one line per leaf."""
    a, b = dict(leaves(tree)), dict(leaves(other))
    lines = []
    for path in sorted(a.keys() | b.keys()):
        sides = [f"{list(t[path].shape)} {str(t[path].dtype)[6:]}" if path in t else "absent" for t in (a, b)]
        if sides[0] != sides[1]:
            lines.append(f"{path}: {sides[0]} against {sides[1]}")
    return lines


def to(tree: Tree, device: torch.device) -> Tree:
    """Tree on a device: leaves on another device are sent in one copy, the others are not copied."""
    moving = [leaf for _, leaf in leaves(tree) if leaf.device.type != device.type]
    if not moving:
        return tree
    # Each leaf is aligned as an allocation of its own would be, so that the same kernels are chosen.
    ends = [*itertools.accumulate(-(-leaf.nbytes // ALIGNED) * ALIGNED for leaf in moving)]
    packed = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for start, leaf in zip([0, *ends], moving, strict=False):
        _cut(packed, start, leaf).copy_(leaf)
    on_device = packed.to(device, non_blocking=True)
    moved = (_cut(on_device, start, leaf) for start, leaf in zip([0, *ends], moving, strict=False))
    return map(lambda leaf: leaf if leaf.device.type == device.type else next(moved), tree)


def to_host(tree: Tree, copy: Callable[[Tensor], Tensor] = Tensor.cpu) -> Tree:
    """Tree detached, contiguous and in host memory; leaves on a device are fetched in one copy, made by `copy`."""
    # Wide dtypes first, so that each leaf begins at a multiple of its element size.
    moving = sorted((leaf for _, leaf in leaves(tree) if not leaf.is_cpu), key=lambda leaf: -leaf.element_size())
    if not moving:
        return map(lambda leaf: leaf.detach().contiguous(), tree)
    packed = copy(torch.cat([leaf.detach().reshape(-1).view(torch.uint8) for leaf in moving]))
    ends = [*itertools.accumulate(leaf.nbytes for leaf in moving)]
    on_host = {id(leaf): _cut(packed, start, leaf) for start, leaf in zip([0, *ends], moving, strict=False)}
    return map(lambda leaf: leaf.detach().contiguous() if leaf.is_cpu else on_host[id(leaf)], tree)


def _cut(packed: Tensor, start: int, like: Tensor) -> Tensor:
    """View of packed bytes from `start`, with the shape and dtype of a leaf."""
    return packed[start : start + like.nbytes].view(like.dtype).view(like.shape)
