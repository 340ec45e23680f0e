"""Turns any torch module whose last layer is linear into a model: that layer is the head, the rest the body."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, make_dataclass
from functools import cache, cached_property
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from pflmpi.errors import ConfigError
from pflmpi.models.base import Architecture, Model, Shape, run_reference
from pflmpi.models.built_module import Recipe
from pflmpi.models.head_place import replace_head
from pflmpi.models.installed_module import InstalledModule
from pflmpi.models.layers import linear
from pflmpi.models.module_parts import KeyedDropout, copy_weights, flatten_names, unflatten_names
from pflmpi.models.module_trial import Findings, examine
from pflmpi.text import short_repr
from pflmpi.tree import Tree, part
from pflmpi.vmap_lanes import outside_vmap

HOST = torch.device("cpu")
_COPIES = 3  # models, such as own, global and previous, that one loss may call a module with
_TYPES = (bool, int, float, str)
_FROM_DATA = ("num_classes", "in_channels", "shape")  # arguments of a module that are set from the data


@dataclass(frozen=True, kw_only=True)
class ModuleArchitecture(Architecture):
    """A torch module without its head, called on trees; body and statistics keep the module's names."""

    replays_steps: ClassVar[bool] = False

    has_batch_norm: bool  # type: ignore[misc]
    has_convolution: bool  # type: ignore[misc]
    suits_lanes: bool  # type: ignore[misc]
    draws_noise: bool  # type: ignore[misc]
    recipe: Recipe
    findings: Findings
    check: bool = field(default=True, compare=False)  # whether it is compared with plain PyTorch before the first round

    @property
    def linear_head(self) -> bool:  # type: ignore[override]
        return not self.findings.own_head

    @property
    def draws_head(self) -> bool:
        """Whether the head is made anew: it is for other classes, or missing in the file of weights."""
        return self.findings.new_head or (self.recipe.weights is not None and not self.findings.head_in_file)

    @property
    def constants(self) -> tuple[str, ...]:
        names = (name for name in self.findings.state if name not in self.findings.updated)
        return tuple(f"stats/{name.replace('.', '/')}" for name in names)

    @property
    def layers(self) -> tuple[str, ...]:
        return *self.findings.layers, "head"

    @property
    def frozen(self) -> tuple[str, ...]:
        return self.findings.frozen

    def init(self, rng: np.random.Generator) -> Tree:
        module, loaded = self.recipe.build(int(rng.integers(2**63)))
        if self.findings.new_head:
            head = linear(rng, self.num_features, self.num_classes)
        else:  # as the module initialised it
            parameters = module.get_submodule(self.recipe.head).named_parameters()
            head = unflatten_names({name: value.detach().clone() for name, value in parameters})
        replace_head(module, self.recipe.head)
        return {**copy_weights(module, self.findings.state), "head": {**head, **loaded}}

    def features(self, params: Tree, x: Tensor, training: bool) -> Tensor:
        leaves = {
            **(flatten_names(part(params, "body")) if "body" in params else {}),  # empty ones are in no message
            **(flatten_names(part(params, "stats")) if self.findings.state else {}),
        }
        key = self.noise_key(params) if self.draws_noise and training else None
        return self._body(leaves, training, x.device).call(leaves, key, training, x)

    def logits(self, head: Tree, z: Tensor) -> Tensor:
        if not self.findings.own_head:
            return super().logits(head, z)
        module = self._heads.get(z.device)
        if module is None:
            with outside_vmap():
                layer = self.recipe.build(0)[0].get_submodule(self.recipe.head).to(z.device)
                module = self._heads[z.device] = InstalledModule(layer, (), (), (), self.name)
        return module.call(flatten_names(head), None, False, z)

    @property
    def state_dict_entries(self) -> tuple[dict[str, str], dict[str, Tensor]]:
        """The path in a model of each entry of the module's state dict, "" for constants; and the constants."""
        paths = dict(self.findings.entries)
        values = self._bodies[HOST][0].module.state_dict()
        counter = torch.tensor(0)  # of batch norm, which was removed from the module
        return paths, {name: values.get(name, counter) for name, path in paths.items() if not path}

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """Context in which nothing is dropped on the host."""
        bodies = self._bodies.setdefault(HOST, [])
        while len(bodies) < self._copies:
            bodies.append(self._built(HOST))
        layers = [layer for body in bodies for layer in body.dropouts.values()]
        before = [layer.p for layer in layers]
        for layer in layers:
            layer.p = 0.0
        try:
            yield
        finally:
            for layer, p in zip(layers, before, strict=True):
                layer.p = p

    @cached_property
    def _bodies(self) -> dict[torch.device, list[InstalledModule]]:
        """By device, modules with the leaves that they were last called with, least recently used first."""
        return {}

    @cached_property
    def _heads(self) -> dict[torch.device, InstalledModule]:
        return {}

    def _body(self, leaves: dict[str, Tensor], training: bool, device: torch.device) -> InstalledModule:
        """Returns the module that holds these leaves, or a new one, or else the least recently used one."""
        bodies = self._bodies.setdefault(device, [])
        body = next((body for body in bodies if body.holds(leaves, training)), None)
        if body is not None:
            bodies.remove(body)
        elif len(bodies) < self._copies:
            body = self._built(device)
        else:
            body = bodies.pop(0)
        bodies.append(body)
        return body

    @property
    def _copies(self) -> int:
        """Modules for each device: one is enough if its backward pass does not read it again."""
        return _COPIES if self.findings.rereads_module else 1

    def _built(self, device: torch.device) -> InstalledModule:
        with outside_vmap():
            module, _ = self.recipe.build(0)
            replace_head(module.to(device), self.recipe.head)
            findings = self.findings
            return InstalledModule(module, findings.state, findings.updated, findings.replaced, self.name)


@dataclass(frozen=True, kw_only=True)
class ModuleModel(Model):
    """A torch module as a model; its arguments are further fields, but for those with the name of a field here."""

    kind: ClassVar[Callable[..., nn.Module]]
    from_data: ClassVar[tuple[str, ...]]  # names of arguments that are set from the data
    shared_names: ClassVar[Mapping[str, inspect.Parameter]] = {}  # arguments with the name of a field of this class

    head: Annotated[str, Field(description="name of the linear layer that ends the module, such as fc")]
    norm: Annotated[
        Literal["as_written", "group"], Field(description="group: group norm in place of every batch norm")
    ] = "as_written"
    weights: Annotated[
        str | None,
        Field(description="file of a state dict to start from, .pt (tensors only) or .safetensors; or RUN@ROUND"),
    ] = None
    check: Annotated[
        bool, Field(description="compare some steps with plain PyTorch before the first round, and refuse what differs")
    ] = True
    arguments: Annotated[
        dict[str, bool | int | float | str],
        Field(description="arguments of the module that are called as keys of this section are, such as {norm: true}"),
    ] = field(default_factory=dict)

    @classmethod
    def check_keys(cls, values: Mapping[str, Any]) -> None:
        named, keys = values.get("arguments"), {key.name for key in dataclasses.fields(ModuleModel)}
        for name in cls.shared_names:
            if name in values and not (isinstance(named, Mapping) and name in named):
                instead = f"model.arguments: {{{name}: ...}}"
                problem = f"is no key, as models have {name!r} themselves; give the argument of {cls.name} as {instead}"
                if name in keys:
                    problem = (
                        f"may be a key of every module or the argument {name!r} of {cls.name}; give the latter as "
                        f"{instead}, beside which model.{name} is the former"
                    )
                raise ConfigError(f"model.{name} {problem}")

    def __post_init__(self) -> None:
        for name, value in self.arguments.items():
            if name not in self.shared_names:
                known = ", ".join(self.shared_names) or "none"
                raise ConfigError(
                    f"model.arguments.{name} is no argument of {self.name} that is called as a key is; known: {known}"
                )
            expected = _type_of(self.shared_names[name])
            if type(value) is not expected and not (expected is float and type(value) is int):
                raise ConfigError(f"model.arguments.{name} = {short_repr(value)}: must be a {expected.__name__}")
        defaults = {name: parameter.default for name, parameter in self.shared_names.items()}
        arguments = {**defaults, **self.arguments}
        if missing := [name for name, value in arguments.items() if value is inspect.Parameter.empty]:
            raise ConfigError(f"model.arguments.{missing[0]} is missing: {self.name} has no default for it")
        object.__setattr__(self, "arguments", arguments)  # with defaults, so that the recorded configuration has all

    def bind(self, shape: Shape, num_classes: int, samples: Tensor | None = None) -> Architecture:
        """See `Model.bind`; `samples` [2, *shape] are inputs of the trial passes, None for made-up ones."""
        keys = {key.name for key in dataclasses.fields(ModuleModel)}
        arguments = {name: value for name, value in vars(self).items() if name not in keys} | self.arguments
        of_data = {"num_classes": num_classes, "in_channels": shape[0], "shape": shape}
        options = (*arguments.items(), *((name, of_data[name]) for name in self.from_data))
        file = None if run_reference(self.weights) else self.weights
        recipe = Recipe(type(self).kind, options, self.head, self.norm, file, num_classes)
        findings, body = examine(self.name, recipe, shape, samples)
        layers = list(body.module.modules())
        architecture = ModuleArchitecture(
            name=self.name,
            shape=shape,
            num_classes=num_classes,
            num_features=findings.num_features,
            has_batch_norm=bool(findings.updated),
            has_convolution=any(isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) for layer in layers),
            suits_lanes=not body.hooks
            and not any(isinstance(layer, nn.RNNBase | nn.LSTMCell | nn.MultiheadAttention) for layer in layers),
            draws_noise=any(isinstance(layer, KeyedDropout) and layer.p > 0 for layer in layers),
            recipe=recipe,
            findings=findings,
            check=self.check,
        )
        architecture._bodies[HOST] = [body]
        return architecture


@cache
def module_model(kind: Callable[..., nn.Module]) -> type[ModuleModel]:
    """Makes the model class of a module class, or of a function that makes a module."""
    fields: list[tuple[str, Any, Any]] = []
    from_data = []
    shared_names: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        default, hint = parameter.default, parameter.annotation
        if name in _FROM_DATA:
            from_data.append(name)
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
                    f"the arguments {', '.join(_FROM_DATA)} are given by the data"
                )
            fields.append((name, hint, field()))
    namespace = {
        "name": kind.__qualname__,
        "summary": (inspect.getdoc(kind) or kind.__qualname__).partition("\n")[0],
        "kind": staticmethod(kind),
        "from_data": tuple(from_data),
        "shared_names": shared_names,
    }
    model = make_dataclass(
        kind.__qualname__, fields, bases=(ModuleModel,), namespace=namespace, frozen=True, kw_only=True
    )
    model.__module__ = kind.__module__
    return model


def _type_of(parameter: inspect.Parameter) -> type:
    """Returns the type of a parameter's default, or without default its annotation."""
    kind: type = parameter.annotation if parameter.default is parameter.empty else type(parameter.default)
    return kind
