"""Selecting parts of a parameter tree by path."""

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce

from pflmpi import tree
from pflmpi.errors import ConfigError
from pflmpi.tree import Tree


def has_path(params: Tree, path: str) -> bool:
    """Whether there is a leaf or a subtree at a path."""
    first, _, rest = path.partition("/")
    value = params.get(first)
    return value is not None and (not rest or (isinstance(value, dict) and has_path(value, rest)))


def overlay(params: Tree, other: Tree) -> Tree:
    """The leaves of both trees; the second tree's where both have one.

    >>> overlay({"body": {"conv1": {}}}, {"body": {"fc1": {}}, "head": {}})
    {'body': {'conv1': {}, 'fc1': {}}, 'head': {}}
    """
    result = dict(params)
    for key, value in other.items():
        own = result.get(key)
        result[key] = overlay(own, value) if isinstance(own, dict) and isinstance(value, dict) else value
    return result


def select_parts(params: Tree, paths: Iterable[str]) -> Tree:
    """The subtree with the parts at some paths.

    >>> select_parts({"body": {"conv1": {}, "fc1": {}}, "head": {}}, ["body/fc1", "head"])
    {'body': {'fc1': {}}, 'head': {}}
    """
    result: Tree = {}
    for path in paths:
        *parents, last = path.split("/")
        subtree: Tree = {last: reduce(tree.part, parents, params)[last]}
        for key in reversed(parents):
            subtree = {key: subtree}
        result = overlay(result, subtree)
    return result


def group_by_layer(layers: Sequence[str], params: Tree) -> dict[str, tuple[str, ...]]:
    """Paths of the parameters of each layer, weights before biases; each belongs to its innermost layer.

    >>> group_by_layer(["body", "body/fc1"], {"body": {"fc1": {"bias": 0, "weight": 0}, "token": 0}})
    {'body': ('body/token',), 'body/fc1': ('body/fc1/weight', 'body/fc1/bias')}
    """
    owned: dict[str, list[str]] = {layer: [] for layer in layers}
    for path in sorted(dict(tree.leaves(params)), reverse=True):
        enclosing = [layer for layer in layers if path.startswith(f"{layer}/")]
        if not enclosing:
            raise ConfigError(f"{path} of the model is in none of its layers ({', '.join(layers)}); `layers` names all")
        owned[max(enclosing, key=len)].append(path)
    return {layer: tuple(paths) for layer, paths in owned.items()}


def select_trained(params: Tree, paths: Iterable[str]) -> Tree:
    """Like `select_parts`, but with an empty body or head for models that train nothing of it.

    >>> select_trained({"head": {}}, ["body", "head"])
    {'body': {}, 'head': {}}
    """
    return select_parts({"body": {}, "head": {}, **params}, paths)


def remaining_paths(params: Tree, excluded: tuple[str, ...], prefix: str = "") -> Iterator[str]:
    """Paths of the largest parts that contain none of the excluded paths.

    >>> list(remaining_paths({"body": {"conv1": {}, "fc1": {}}, "head": {}}, ("body/fc1",)))
    ['body/conv1', 'head']
    """
    for name, value in params.items():
        path = prefix + name
        if path in excluded:
            continue
        if isinstance(value, dict) and any(other.startswith(path + "/") for other in excluded):
            yield from remaining_paths(value, excluded, path + "/")
        else:
            yield path
