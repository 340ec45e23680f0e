"""Any torch module whose last layer is linear, as a model: its head by name, the rest as the body."""

import dataclasses
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

from pflmpi.errors import ConfigError
from pflmpi.models.base import Architecture, Model, Shape
from pflmpi.models.built_module import build, num_features_of
from pflmpi.models.initial import linear
from pflmpi.models.module_parts import KeyedDropout, flat, key_dropout, split
from pflmpi.models.weights_file import read_weights
from pflmpi.text import shown
from pflmpi.tree import Tree, part

_TYPES = (bool, int, float, str)
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
    suits_lanes: bool  # type: ignore[misc]
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
        names = (name.partition(".parametrizations.") for name, _ in self._training.named_parameters())
        owners = (name if rest else name.rpartition(".")[0] for name, rest, _ in names)
        return *dict.fromkeys(f"body.{name}".rstrip(".").replace(".", "/") for name in owners), "head"

    def init(self, rng: np.random.Generator) -> Tree:
        module = build(self.kind, self.options, self.head, self.norm, int(rng.integers(2**63)))
        head = linear(rng, self.num_features, self.num_classes)
        if self.weights is not None:
            head |= read_weights(Path(self.weights), module, self.head, self.num_classes)
        module.set_submodule(self.head, nn.Identity())
        return {**split(module), "head": head}

    def features(self, params: Tree, x: Tensor, training: bool) -> Tensor:
        module = self._training if training else self._evaluation
        weights = {**flat(part(params, "body")), **(flat(part(params, "stats")) if self.has_batch_norm else {})}
        if self.draws_noise:
            weights |= key_dropout(module, self.noise_key(params) if training else torch.tensor(0))
        z = torch.func.functional_call(module, weights, (x,), strict=True)
        assert isinstance(z, Tensor)
        return z


@dataclass(frozen=True, kw_only=True)
class ModuleModel(Model):
    """A torch module as a model; the arguments of the module are further fields, but for those called as keys here.

    Attributes:
        shared_names: of the latter, the parameters by name.
    """

    kind: ClassVar[Callable[..., nn.Module]]
    given: ClassVar[tuple[str, ...]]
    shared_names: ClassVar[Mapping[str, inspect.Parameter]] = {}

    head: Annotated[str, Field(description="name of the linear layer that ends the module, such as fc")]
    norm: Annotated[
        Literal["as_written", "group"], Field(description="group: group norm in place of every batch norm")
    ] = "as_written"
    weights: Annotated[
        str | None, Field(description="file of a state dict to start from: .pt (tensors only) or .safetensors")
    ] = None
    arguments: Annotated[
        dict[str, bool | int | float | str],
        Field(description="arguments of the module that are called as keys of this section are, such as {norm: true}"),
    ] = field(default_factory=dict)

    @classmethod
    def check_keys(cls, values: Mapping[str, Any]) -> None:
        named = values.get("arguments")
        for name in cls.shared_names:
            if name in values and not (isinstance(named, Mapping) and name in named):
                raise ConfigError(
                    f"model.{name} may be a key of every module or the argument {name!r} of {cls.name}; give the "
                    f"latter as model.arguments: {{{name}: ...}}, beside which model.{name} is the former"
                )

    def __post_init__(self) -> None:
        for name, value in self.arguments.items():
            if name not in self.shared_names:
                known = ", ".join(self.shared_names) or "none"
                raise ConfigError(
                    f"model.arguments.{name} is no argument of {self.name} that is called as a key is; known: {known}"
                )
            expected = _type_of(self.shared_names[name])
            if type(value) is not expected and not (expected is float and type(value) is int):
                raise ConfigError(f"model.arguments.{name} = {shown(value)}: must be a {expected.__name__}")
        defaults = {name: one.default for name, one in self.shared_names.items()}
        arguments = {**defaults, **self.arguments}
        if missing := [name for name, value in arguments.items() if value is inspect.Parameter.empty]:
            raise ConfigError(f"model.arguments.{missing[0]} is missing: {self.name} has no default for it")
        object.__setattr__(self, "arguments", arguments)  # all of them, for who reads the recorded configuration

    def bind(self, shape: Shape, num_classes: int) -> Architecture:
        ours = {one.name for one in dataclasses.fields(ModuleModel)}
        own = {**{name: value for name, value in vars(self).items() if name not in ours}, **self.arguments}
        known = {"num_classes": num_classes, "in_channels": shape[0], "shape": shape}
        options = tuple({**own, **{name: known[name] for name in self.given}}.items())
        module = build(type(self).kind, options, self.head, self.norm, 0)
        num_features = num_features_of(self.name, module, self.head, shape)
        modules = list(module.modules())
        return ModuleArchitecture(
            name=self.name,
            shape=shape,
            num_classes=num_classes,
            num_features=num_features,
            has_batch_norm="stats" in split(module),
            has_convolution=any(isinstance(one, nn.Conv1d | nn.Conv2d | nn.Conv3d) for one in modules),
            suits_lanes=not any(isinstance(one, nn.RNNBase | nn.LSTMCell | nn.MultiheadAttention) for one in modules),
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
    shared_names: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        default, hint = parameter.default, parameter.annotation
        if name in _GIVEN:
            given.append(name)
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name == "progress":
            continue
        elif hasattr(ModuleModel, name) or name in ModuleModel.__dataclass_fields__:
            if _type_of(parameter) in _TYPES:
                shared_names[name] = parameter
        elif type(default) in _TYPES:
            fields.append((name, type(default) if hint is parameter.empty else hint, field(default=default)))
        elif default is parameter.empty:
            if hint not in _TYPES:
                raise ConfigError(
                    f"{kind.__qualname__}: its argument {name!r} needs a default, or a type: bool, int, float or str; "
                    f"the arguments {', '.join(_GIVEN)} are given by the data"
                )
            fields.append((name, hint, field()))
    about = (inspect.getdoc(kind) or kind.__qualname__).partition("\n")[0]
    namespace = {"name": kind.__qualname__, "summary": about, "kind": staticmethod(kind), "given": tuple(given)}
    namespace["shared_names"] = shared_names
    found = make_dataclass(
        kind.__qualname__, fields, bases=(ModuleModel,), namespace=namespace, frozen=True, kw_only=True
    )
    found.__module__ = kind.__module__
    return found


def _type_of(parameter: inspect.Parameter) -> type:
    """The type of a parameter's default, or of what it takes where it has none."""
    found: type = parameter.annotation if parameter.default is parameter.empty else type(parameter.default)
    return found
