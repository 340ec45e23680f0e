"""A torch module as its class makes it, and whether it is one that can be trained here: a body, and a linear head."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pflmpi import global_generators
from pflmpi.errors import ConfigError
from pflmpi.models.module_parts import prepare, replace_batch_norm
from pflmpi.models.weights_file import read_weights


@dataclass(frozen=True)
class Recipe:
    """How a module is made.

    Attributes:
        kind: makes the module.
        options: its arguments.
        head: name of the linear layer that ends it.
        norm: "group" for group norm in place of batch norm.
        weights: file of a state dict to start from.
        num_classes: K.
    """

    kind: Callable[..., nn.Module]
    options: tuple[tuple[str, Any], ...]
    head: str
    norm: str
    weights: str | None
    num_classes: int

    def build(self, seed: int) -> tuple[nn.Module, dict[str, Tensor]]:
        """A new module, its dropout keyed, and the weights of its head from the file; values follow from `seed` alone.

        Raises:
            ConfigError: it is none that can be trained here.
        """
        module = self._made(seed)
        for name, parameter in module.named_parameters():
            _check_parameter(name, parameter)
        self._check_head(module)
        prepare(module, self.norm)
        return module, self._loaded(module)

    def plain(self, seed: int) -> nn.Module:
        """A new module as its class makes it, without dropout, with a head for the classes: to compare with."""
        module = self._made(seed)
        self._loaded(module)
        if self.norm == "group":
            replace_batch_norm(module)
        for layer in module.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
        head = module.get_submodule(self.head)
        assert isinstance(head, nn.Linear)
        if type(head) is nn.Linear and head.out_features != self.num_classes:
            module.set_submodule(self.head, nn.Linear(head.in_features, self.num_classes))
        return module

    def buffers_of_seed(self, names: list[str], module: nn.Module) -> list[str]:
        """Which of these buffers of a module that was built with the seed 0 another seed changes."""
        other = dict(self._made(1).named_buffers()) if names else {}
        values = dict(module.named_buffers())
        return [name for name in names if not equal(values[name], other[name])]

    def _made(self, seed: int) -> nn.Module:
        with global_generators.seeded(seed):
            return self.kind(**dict(self.options))

    def _loaded(self, module: nn.Module) -> dict[str, Tensor]:
        return {} if self.weights is None else read_weights(Path(self.weights), module, self.head, self.num_classes)

    def _check_head(self, module: nn.Module) -> None:
        linears = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
        if self.head not in linears:
            known = ", ".join(linears) or "none"
            raise ConfigError(f"model.head = {self.head!r} is no nn.Linear of the module; known: {known}")
        layer = module.get_submodule(self.head)
        assert isinstance(layer, nn.Linear)
        tied = {id(parameter) for parameter in layer.parameters()}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) in tied and not name.startswith(f"{self.head}."):
                raise ConfigError(f"{name} and the head {self.head} of the module are one parameter; give each its own")
        if buffer := next(layer.named_buffers(), None):
            raise ConfigError(
                f"model.head = {self.head!r} has a buffer, {buffer[0]}; a head has parameters alone: compute what it "
                "keeps in the layers before it"
            )
        if layer.bias is None:
            raise ConfigError(f"model.head = {self.head!r} has no bias; a head is nn.Linear with bias")
        if not is_plain(layer) and layer.out_features != self.num_classes:
            raise ConfigError(
                f"model.head = {self.head!r}, a {type(layer).__name__}, has {layer.out_features} outputs for "
                f"{self.num_classes} classes, and only a plain nn.Linear is made anew; let the module take num_classes"
            )


def is_plain(head: nn.Module) -> bool:
    """Whether a layer computes x W^T + b and nothing else happens."""
    hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)
    parameters = [parameter._backward_hooks for parameter in head.parameters()]
    return type(head) is nn.Linear and not any([*hooks, *parameters])


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same values, where not a number is as another one."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if is_lazy(parameter):
        raise ConfigError(f"{name} of the module has no size before its first call; use a layer that states sizes")
    if not parameter.requires_grad:
        raise ConfigError(
            f"{name} of the module has requires_grad = False, but all parameters of a model are trained; leave "
            'that out, and fix it in an algorithm of your own: train(..., frozen=("body/LAYER",))'
        )
    if parameter.dtype != torch.float32:
        raise ConfigError(f"{name} of the module is {str(parameter.dtype)[6:]}; parameters are float32")
    if parameter._post_accumulate_grad_hooks:
        raise ConfigError(
            f"{name} of the module has a hook for accumulated gradients, and none are accumulated here; "
            "use register_hook"
        )
