"""Trees: nested dicts of tensors with string keys, always walked in sorted order.

A *path* is the keys from the root joined by "/". An empty dict is a tree without leaves.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Union

import torch
from torch import Tensor

Tree = dict[str, Union[Tensor, "Tree"]]


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
        rest = [other[key] for other in others]
        if isinstance(value, dict):
            result[key] = map(function, value, *rest)  # type: ignore[arg-type]
        else:
            result[key] = function(value, *rest)
    return result


def clone(tree: Tree) -> Tree:
    """Copy whose leaves own their memory (and are aligned, which affects bits in some kernels)."""
    return map(lambda leaf: leaf.clone(memory_format=torch.contiguous_format), tree)


def like(tree: Tree) -> Tree:
    """Shapes and dtypes of a tree as tensors without memory (device "meta")."""
    return map(lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"), tree)


def num_bytes(tree: Tree) -> int:
    """Bytes of all leaves."""
    return sum(leaf.numel() * leaf.element_size() for _, leaf in leaves(tree))


def stack(trees: list[Tree]) -> Tree:
    """Tree whose leaves hold the given trees' leaves along a new first axis."""
    return map(lambda *rows: torch.stack(rows), trees[0], *trees[1:])


def row(tree: Tree, index: int) -> Tree:
    """Row `index` of every leaf, as tensors that own their memory."""
    return map(lambda leaf: leaf[index].clone(), tree)


def differences(tree: Tree, other: Tree) -> list[str]:
    """Differences in structure, shape or dtype, one line per leaf."""
    a, b = dict(leaves(tree)), dict(leaves(other))
    found = []
    for path in sorted(a.keys() | b.keys()):
        sides = [f"{list(t[path].shape)} {str(t[path].dtype)[6:]}" if path in t else "absent" for t in (a, b)]
        if sides[0] != sides[1]:
            found.append(f"{path}: {sides[0]} against {sides[1]}")
    return found


def to(tree: Tree, device: torch.device) -> Tree:
    """Tree on a device; leaves already there are not copied."""
    return map(lambda leaf: leaf.to(device), tree)


def to_host(tree: Tree) -> Tree:
    """Tree detached, contiguous and in host memory."""
    return map(lambda leaf: leaf.detach().cpu().contiguous(), tree)
