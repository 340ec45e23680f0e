"""Any torch module whose last layer is linear, as a model: its head by name, the rest as the body."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, make_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pflmpi import global_generators, tree
from pflmpi.errors import ConfigError
from pflmpi.models.base import Architecture, Model, Shape
from pflmpi.models.initial import linear
from pflmpi.models.module_parts import KeyedDropout, key_dropout, prepare, split
from pflmpi.models.weights_file import read_weights
from pflmpi.tree import Tree, part

_GIVEN = ("num_classes", "in_channels", "shape")  # arguments of a module that follow from the data


@dataclass(frozen=True, kw_only=True)
class ModuleArchitecture(Architecture):
    """A torch module without its head, called on trees; body and statistics keep the module's names.

    Attributes:
        kind: makes the module.
        options: its arguments.
        head: name of the linear layer that ends it.
        norm: "group" for group norm in place of batch norm.
        weights: file of a state dict to start from.
    """

    has_batch_norm: bool  # type: ignore[misc]
    has_convolution: bool  # type: ignore[misc]
    draws_noise: bool  # type: ignore[misc]
    kind: Callable[..., nn.Module]
    options: tuple[tuple[str, Any], ...]
    head: str
    norm: str
    weights: str | None
    # One skeleton per mode, so that no call changes either.
    _training: nn.Module = field(init=False, repr=False, compare=False)
    _evaluation: nn.Module = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("_training", "_evaluation"):
            module = build(self.kind, self.options, self.head, self.norm, 0)
            module.set_submodule(self.head, nn.Identity())
            object.__setattr__(self, name, module.train(name == "_training"))

    @property
    def layers(self) -> tuple[str, ...]:
        owners = [name.rpartition(".")[0] for name, _ in self._training.named_parameters() if name.endswith(".weight")]
        return *("body/" + name.replace(".", "/") for name in owners), "head"

    def init(self, rng: np.random.Generator) -> Tree:
        module = build(self.kind, self.options, self.head, self.norm, int(rng.integers(2**63)))
        head = linear(rng, self.num_features, self.num_classes)
        if self.weights is not None:
            head |= read_weights(Path(self.weights), module, self.head, self.num_classes)
        module.set_submodule(self.head, nn.Identity())
        return {**split(module), "head": head}

    def features(self, params: Tree, x: Tensor, training: bool) -> Tensor:
        module = self._training if training else self._evaluation
        weights = {**_flat(part(params, "body")), **(_flat(part(params, "stats")) if self.has_batch_norm else {})}
        if self.draws_noise:
            weights |= key_dropout(module, self.noise_key(params) if training else torch.tensor(0))
        z = torch.func.functional_call(module, weights, (x,), strict=True)
        assert isinstance(z, Tensor)
        return z


@dataclass(frozen=True, kw_only=True)
class ModuleModel(Model):
    """A torch module as a model; the arguments of the module are further fields."""

    kind: ClassVar[Callable[..., nn.Module]]
    given: ClassVar[tuple[str, ...]]

    head: Annotated[str, Field(description="name of the linear layer that ends the module, such as fc")]
    norm: Annotated[
        Literal["as_written", "group"], Field(description="group: group norm in place of every batch norm")
    ] = "as_written"
    weights: Annotated[
        str | None, Field(description="file of a state dict to start from: .pt (tensors only) or .safetensors")
    ] = None

    def bind(self, shape: Shape, num_classes: int) -> Architecture:
        own = {name: value for name, value in vars(self).items() if name not in ("head", "norm", "weights")}
        known = {"num_classes": num_classes, "in_channels": shape[0], "shape": shape}
        options = tuple({**own, **{name: known[name] for name in self.given}}.items())
        module = build(type(self).kind, options, self.head, self.norm, 0)
        num_features = _check(self.name, module, self.head, shape)
        modules = list(module.modules())
        return ModuleArchitecture(
            name=self.name,
            shape=shape,
            num_classes=num_classes,
            num_features=num_features,
            has_batch_norm="stats" in split(module),
            has_convolution=any(isinstance(one, nn.Conv1d | nn.Conv2d | nn.Conv3d) for one in modules),
            draws_noise=any(isinstance(one, KeyedDropout) for one in modules),
            kind=type(self).kind,
            options=options,
            head=self.head,
            norm=self.norm,
            weights=self.weights,
        )


@cache
def module_model(kind: Callable[..., nn.Module]) -> type[ModuleModel]:
    """The model class of a module class, or of a function that makes a module."""
    fields: list[tuple[str, Any, Any]] = []
    given = []
    for name, parameter in inspect.signature(kind).parameters.items():
        default, hint = parameter.default, parameter.annotation
        if name == "name":
            raise ConfigError(f"{kind.__qualname__}: `model.name` is a key already; rename its argument 'name'")
        if name in _GIVEN:
            given.append(name)
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name in ("weights", "progress"):
            continue
        elif type(default) in (bool, int, float, str):
            fields.append((name, type(default) if hint is parameter.empty else hint, field(default=default)))
        elif default is parameter.empty:
            if hint not in (bool, int, float, str):
                raise ConfigError(
                    f"{kind.__qualname__}: its argument {name!r} needs a default, or a type: bool, int, float or str; "
                    f"the arguments {', '.join(_GIVEN)} are given by the data"
                )
            fields.append((name, hint, field()))
    about = (inspect.getdoc(kind) or kind.__qualname__).partition("\n")[0]
    namespace = {"name": kind.__qualname__, "summary": about, "kind": staticmethod(kind), "given": tuple(given)}
    found = make_dataclass(
        kind.__qualname__, fields, bases=(ModuleModel,), namespace=namespace, frozen=True, kw_only=True
    )
    found.__module__ = kind.__module__
    return found


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
    prepare(module, norm)
    return module


def _check(name: str, module: nn.Module, head: str, shape: Shape) -> int:
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


def _flat(nested: Tree) -> Mapping[str, Tensor]:
    return {path.replace("/", "."): value for path, value in tree.leaves(nested)}
