"""Frozen parameters of a model, and parameters that a configuration names by pattern."""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain

import torch

from pflmpi import tree
from pflmpi.errors import ConfigError
from pflmpi.models.base import Architecture, Model
from pflmpi.module_names import module_names
from pflmpi.text import join_truncated
from pflmpi.tree import Tree
from pflmpi.vmap_lanes import outside_vmap


@dataclass(frozen=True)
class Frozen:
    """The frozen parameters of a model: one copy on each device, shared by all clients and lanes."""

    digest: str = ""  # SHA-256 (hex) of their paths and values; "" if there are none
    paths: tuple[str, ...] = ()  # in a whole model
    _values: dict[torch.device, Tree] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, model: Tree, paths: Sequence[str]) -> "Frozen":
        """Takes the leaves at some paths from a whole model on the host."""
        values = {path: tree.at(model, path).detach().contiguous() for path in sorted(paths)}
        sha = hashlib.sha256()
        for path, value in values.items():
            sha.update(f"{path} {value.dtype} {list(value.shape)}\n".encode())
            sha.update(value.numpy().data)
        return cls(sha.hexdigest(), tuple(values), {torch.device("cpu"): tree.unflatten(values)})

    @property
    def num_bytes(self) -> int:
        """Bytes on each device."""
        return tree.num_bytes(self.on(torch.device("cpu")))

    def on(self, device: torch.device) -> Tree:
        """Returns the values on a device; the first call copies them there."""
        if not self.paths:
            return {}
        if device not in self._values:
            with outside_vmap():
                self._values[device] = tree.map(lambda leaf: leaf.to(device), self._values[torch.device("cpu")])
        return self._values[device]


def remove_paths(model: Tree, paths: Collection[str]) -> Tree:
    """Returns a whole model without the leaves at some paths; it keeps a body and a head even if these are empty."""
    if not paths:
        return model
    return {
        "body": {},
        "head": {},
        **tree.unflatten({path: leaf for path, leaf in tree.leaves(model) if path not in paths}),
    }


def parameter_names(
    template: Tree, head: str | None = None, entries: Iterable[tuple[str, str]] = ()
) -> dict[str, list[str]]:
    """Returns the names in a torch module of each parameter of a whole model, by path; see `module_names`.

    Args:
        entries: names in a state dict with their paths, as in `Findings`: a tied parameter has several.
    """
    paths = [path for path, _ in tree.leaves(template) if not path.startswith("stats/")]
    names = {path: [name] for path, name in module_names(paths, head).items()}
    for name, path in entries:
        if path in names and name not in names[path]:
            names[path].append(name)
    return names


def find_frozen_paths(model: Model, architecture: Architecture, names: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Returns the paths that are not trained: all but `model.trainable`, or by default those that the module froze.

    Args:
        names: from `parameter_names`.
    """
    frozen = architecture.frozen
    if model.trainable is not None:
        trained = match_parameters("model.trainable", model.trainable, names, architecture.name)
        frozen = tuple(path for path in names if path not in trained)
    head = [path for path in names if path.startswith("head/")]
    if len(frozen) == len(names):
        raise ConfigError(
            f"no parameter of model {architecture.name} is trained; name some as model.trainable, such as "
            f"[{names[head[0]][0]!r}], or set requires_grad = True in the module"
        )
    trained_head = [path for path in head if path not in frozen]
    if 0 < len(trained_head) < len(head):
        alone = join_truncated([names[path][0] for path in trained_head])
        raise ConfigError(
            f"of the head of model {architecture.name} only {alone} is trained; a head is trained as a whole or not at "
            "all"
        )
    return frozen


def match_parameters(
    key: str, patterns: Sequence[str], names: Mapping[str, Sequence[str]], model: str
) -> tuple[str, ...]:
    """Returns the paths of the parameters one of whose names matches a pattern, such as "*.lora_*".

    Args:
        key: of the configuration, for errors.
        names: from `parameter_names`.
    """
    if not patterns:
        raise ConfigError(f"{key} = []: name at least one pattern, such as ['head.*'], or leave the key out")
    known = [*chain.from_iterable(names.values())]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            what = "trained parameter" if key == "model.personal" else "parameter"
            raise ConfigError(f"{key}: {pattern!r} matches no {what} of model {model}; known: {join_truncated(known)}")
    return tuple(
        path for path, own in names.items() if any(fnmatchcase(name, pattern) for name in own for pattern in patterns)
    )
