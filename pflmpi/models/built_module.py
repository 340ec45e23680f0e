"""A torch module as its class makes it, and whether it is one that can be trained here: a body, and a linear head."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pflmpi import global_generators
from pflmpi.errors import ConfigError
from pflmpi.models.base import Shape
from pflmpi.models.module_parts import prepare


def build(
    kind: Callable[..., nn.Module], options: tuple[tuple[str, Any], ...], head: str, norm: str, seed: int
) -> nn.Module:
    """A new module with its head, its dropout keyed; initial values follow from `seed` alone."""
    with global_generators.seeded(seed):
        module = kind(**dict(options))
    for name, one in module.named_parameters():
        if is_lazy(one):
            raise ConfigError(f"{name} of the module has no size before its first call; use a layer that states sizes")
        if not one.requires_grad:
            raise ConfigError(
                f"{name} of the module has requires_grad = False, but all parameters of a model are trained; leave "
                'that out, and fix it in an algorithm of your own: train(..., frozen=("body/LAYER",))'
            )
    linears = [name for name, one in module.named_modules() if isinstance(one, nn.Linear)]
    if head not in linears:
        raise ConfigError(f"model.head = {head!r} is no nn.Linear of the module; known: {', '.join(linears) or 'none'}")
    tied = {id(one) for one in module.get_submodule(head).parameters()}
    for name, one in module.named_parameters(remove_duplicate=False):
        if id(one) in tied and not name.startswith(f"{head}."):
            raise ConfigError(f"{name} and the head {head} of the module are one parameter; give each its own")
    prepare(module, norm)
    return module


def num_features_of(name: str, module: nn.Module, head: str, shape: Shape) -> int:
    """The number of features; raise `ConfigError` unless the module takes such images and ends with its head."""
    layer = module.get_submodule(head)
    assert isinstance(layer, nn.Linear)
    if layer.bias is None:
        raise ConfigError(f"model.head = {head!r} of {name} has no bias; a head is nn.Linear with bias")
    seen: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].detach()))
    x = torch.linspace(0, 1, 2 * int(np.prod(shape))).view(2, *shape)
    module.eval()
    with torch.no_grad():
        try:
            found = module(x)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            size = "x".join(map(str, shape))
            raise ConfigError(f"model {name} cannot use samples of {size}: {str(error).splitlines()[0]}") from error
        handle.remove()
        if not isinstance(found, Tensor):
            raise ConfigError(f"model {name} returns a {type(found).__name__}; forward must return scores [B, K] alone")
        if len(seen) != 1 or seen[0].shape != (2, layer.in_features) or not torch.equal(found, layer(seen[0])):
            raise ConfigError(
                f"model {name} does not end with {head}: its output must be that of {head} for features "
                f"[B, {layer.in_features}], and nothing may follow, such as a softmax"
            )
    return layer.in_features
