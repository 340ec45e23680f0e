"""Prepares a torch module for training here: keyed dropout, batch norm; names and slots of its tensors."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from pflmpi import tree
from pflmpi.errors import ConfigError
from pflmpi.models.noise import apply_dropout
from pflmpi.tree import Tree

_GROUPS = 32
Slot = tuple[dict[str, Any], str]  # the parameters or buffers of a layer, and a name among them


class KeyedDropout(nn.Module):
    """Dropout whose mask depends on the key of a forward pass alone: the same bits wherever it runs.

    Masks are numbered by layer and by call in a forward pass, so that a layer that is called twice has two masks. A
    call after the forward pass is a recomputation (`torch.utils.checkpoint`): it draws the mask of the pass again, and
    is refused if the pass called the layer several times.

    Attributes:
        of_pass: names of attributes that are only valid during a forward pass.
        key: of the last forward pass, a buffer; None in evaluation, when nothing may be dropped.
        number: of the layer in the module.
    """

    of_pass: ClassVar = ("_calls", "_in_forward")

    key: Tensor | None

    def __init__(self, p: float, number: int, inplace: bool, name: str) -> None:
        super().__init__()
        self.p, self.number, self.inplace, self._name = p, number, inplace, name
        self._calls, self._in_forward = 0, False
        self.register_buffer("key", torch.tensor(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Drops entries of x with probability p in training, and scales the others by 1 / (1 - p)."""
        if not self.training or self.p == 0:
            return x
        if self.key is None:
            raise ConfigError(
                f"{self._name} of the module drops in evaluation, where results would depend on the batches before; "
                "let train(False) of the module put every nn.Dropout in evaluation mode"
            )
        result = apply_dropout(x, self.key, self.p, self.number, self._call())
        return x.copy_(result) if self.inplace else result

    def _call(self) -> int:
        """Counts a call; returns its number in the forward pass."""
        if self._in_forward:
            self._calls += 1
            return self._calls - 1
        if self._calls > 1:
            raise ConfigError(
                f"{self._name} of the module is called {self._calls} times in a forward pass, and computed again in "
                "the backward pass by torch.utils.checkpoint, where its calls cannot be told apart; give each place an "
                "nn.Dropout of its own"
            )
        return 0


@contextmanager
def forward_pass(dropouts: Iterable[KeyedDropout], key: Tensor | None) -> Iterator[None]:
    """Context of a forward pass, in which dropout layers draw their masks from the key; None: they may not drop."""
    for layer in dropouts:
        layer.key, layer._calls, layer._in_forward = key, 0, True
    try:
        yield
    finally:
        for layer in dropouts:
            layer._in_forward = False


def prepare(module: nn.Module, norm: str) -> None:
    """Replaces dropout, and batch norm if `norm` is "group", and removes batch counters that are not read; in place."""
    number = 0
    for name, layer in list(module.named_modules()):
        if type(layer) is nn.Dropout:
            _replace(module, layer, KeyedDropout(layer.p, number, layer.inplace, name))
            number += 1
        elif has_unread_counter(layer):
            layer.num_batches_tracked = None
        if any(isinstance(hook, SpectralNorm) for hook in layer._forward_pre_hooks.values()):
            raise ConfigError(
                f"{name} of the module has nn.utils.spectral_norm, which keeps its weight in an attribute; use "
                "nn.utils.parametrizations.spectral_norm"
            )
    if norm == "group":
        replace_batch_norm(module)


def replace_batch_norm(module: nn.Module) -> None:
    """Replaces every batch norm by group norm with the same weight and bias."""
    for layer in list(module.modules()):
        if isinstance(layer, _BatchNorm):
            channels = layer.num_features
            group = nn.GroupNorm(math.gcd(channels, _GROUPS), channels, layer.eps, layer.affine)
            group.weight, group.bias = layer.weight, layer.bias
            _replace(module, layer, group)


def has_unread_counter(layer: nn.Module) -> bool:
    """Whether a layer is a batch norm of PyTorch that counts batches but, with constant momentum, never reads that."""
    if type(layer) not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        return False
    assert isinstance(layer, _BatchNorm)
    return layer.track_running_stats and layer.momentum is not None


def _replace(module: nn.Module, layer: nn.Module, other: nn.Module) -> None:
    """Replaces a layer by another one, wherever it is registered."""
    for owner in list(module.modules()):
        for name, child in owner._modules.items():
            if child is layer:
                owner._modules[name] = other


def find_dropouts(module: nn.Module) -> dict[str, KeyedDropout]:
    """Returns the dropout layers of a prepared module, by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, KeyedDropout)}


def find_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers of a module by name, without the keys of its dropout."""
    keys = {f"{name}.key" for name in find_dropouts(module)}
    return {name: value for name, value in module.named_buffers() if name not in keys}


def parameters_by_path(module: nn.Module, head: str) -> dict[str, nn.Parameter]:
    """Returns the parameters of a whole module by their paths in a model, given the name of its head."""
    by_path = {}
    for name, value in module.named_parameters():
        path = f"head.{name.removeprefix(f'{head}.')}" if name.startswith(f"{head}.") else f"body.{name}"
        by_path[path.replace(".", "/")] = value
    return by_path


def copy_weights(module: nn.Module, state: tuple[str, ...]) -> Tree:
    """Copies the body, and the statistics if there are any, from a module without its head.

    Args:
        state: the buffers that are statistics; the others are the same in all modules of a kind.
    """
    weights = {name: value.detach().clone() for name, value in module.named_parameters()}
    stats = {name: value.detach().clone() for name, value in find_buffers(module).items() if name in state}
    return {"body": unflatten_names(weights), **({"stats": unflatten_names(stats)} if stats else {})}


def find_slots(module: nn.Module) -> dict[str, list[Slot]]:
    """Returns the slots of each parameter and buffer of a module by name: several for a tied one."""
    by_name: dict[str, list[Slot]] = {}
    names: dict[int, str] = {}
    for prefix, layer in module.named_modules():
        for owner in (layer._parameters, layer._buffers):
            for key, value in owner.items():
                if value is not None:
                    name = names.setdefault(id(value), f"{prefix}.{key}" if prefix else key)
                    by_name.setdefault(name, []).append((owner, key))
    return by_name


def flatten_names(values: Tree) -> dict[str, Tensor]:
    """Returns the tensors of a tree by their names in a module, with dots for slashes."""
    return {path.replace("/", "."): value for path, value in tree.leaves(values)}


def unflatten_names(flat: dict[str, Tensor]) -> Tree:
    """Returns the tree of tensors with these names in a module; the inverse of `flatten_names`."""
    return tree.unflatten({name.replace(".", "/"): value for name, value in flat.items()})
