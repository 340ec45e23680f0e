"""Builds a torch module from its class, arguments and weights, and checks that it can be trained here."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pflmpi import global_generators
from pflmpi.errors import ConfigError
from pflmpi.models.lora import ADAPTERS
from pflmpi.models.module_parts import prepare, replace_batch_norm
from pflmpi.text import UNSTORABLE, first_line


@dataclass(frozen=True)
class Recipe:
    """Class, arguments and weights from which a module for K classes is built."""

    kind: Callable[..., nn.Module]
    options: tuple[tuple[str, Any], ...]
    head: str  # name of the linear layer that ends it
    norm: str  # "group" for group norm in place of batch norm
    weights: str | None  # file of a state dict to start from
    num_classes: int

    def build(self, seed: int) -> tuple[nn.Module, dict[str, Tensor]]:
        """Builds a module with keyed dropout from a seed; returns it, and the head's weights if the file has them."""
        module = self._construct(seed)
        for name, _ in (*module.named_parameters(), *module.named_buffers()):
            if "/" in name:
                raise ConfigError(
                    f"{name} of the module has a / in its name, which separates the parts of a path; leave it out"
                )
            if UNSTORABLE.search(name):
                raise ConfigError(f"{name!r} of the module has a character that no checkpoint can store; leave it out")
        for name, parameter in module.named_parameters():
            _check_parameter(name, parameter)
        self._check_head(module)
        prepare(module, self.norm)
        return module, self._load_weights(module)

    def plain(self, seed: int) -> nn.Module:
        """Builds a module as its class makes it, without dropout and with a head for the classes, to compare with."""
        module = self._construct(seed)
        if self.norm == "group":
            replace_batch_norm(module)
        self._load_weights(module)
        for layer in module.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
        head = module.get_submodule(self.head)
        assert isinstance(head, nn.Linear)
        if type(head) is nn.Linear and head.out_features != self.num_classes:
            module.set_submodule(self.head, nn.Linear(head.in_features, self.num_classes))
        return module

    def buffers_of_seed(self, names: list[str], module: nn.Module) -> list[str]:
        """Returns which of these buffers depend on the seed; `module` was built with the seed 0."""
        other = dict(self._construct(1).named_buffers()) if names else {}
        values = dict(module.named_buffers())
        return [name for name in names if not are_equal(values[name], other[name])]

    def _construct(self, seed: int) -> nn.Module:
        with global_generators.seeded(seed):
            return self.kind(**dict(self.options))

    def _load_weights(self, module: nn.Module) -> dict[str, Tensor]:
        if self.weights is None:
            return {}
        unread = _STATISTICS if self.norm == "group" else _COUNTER
        return read_weights(Path(self.weights), module, self.head, self.num_classes, unread)

    def _check_head(self, module: nn.Module) -> None:
        linears = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
        if self.head not in linears:
            names = ", ".join(linears) or "none"
            raise ConfigError(f"model.head = {self.head!r} is no nn.Linear of the module; known: {names}")
        layer = module.get_submodule(self.head)
        assert isinstance(layer, nn.Linear)
        of_head = {id(parameter) for parameter in layer.parameters()}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) in of_head and not name.startswith(f"{self.head}."):
                raise ConfigError(f"{name} and the head {self.head} of the module are one parameter; give each its own")
        if buffer := next(layer.named_buffers(), None):
            raise ConfigError(
                f"model.head = {self.head!r} has a buffer, {buffer[0]}; a head has parameters alone: compute what it "
                "keeps in the layers before it"
            )
        if layer.bias is None:
            raise ConfigError(f"model.head = {self.head!r} has no bias; a head is nn.Linear with bias")
        replaceable = is_plain(layer) and all(parameter.requires_grad for parameter in layer.parameters())
        if not replaceable and layer.out_features != self.num_classes:
            raise ConfigError(
                f"model.head = {self.head!r}, a {type(layer).__name__}, has {layer.out_features} outputs for "
                f"{self.num_classes} classes, and only a plain nn.Linear that is trained is made anew; let the module "
                "take num_classes"
            )


def is_plain(head: nn.Module) -> bool:
    """Whether a layer is an `nn.Linear` without hooks: it computes x W^T + b and nothing else."""
    hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)
    parameters = [parameter._backward_hooks for parameter in head.parameters()]
    return type(head) is nn.Linear and not any([*hooks, *parameters])


def are_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, type and values; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if is_lazy(parameter):
        raise ConfigError(f"{name} of the module has no size before its first call; use a layer that states sizes")
    if parameter.dtype != torch.float32:
        raise ConfigError(f"{name} of the module is {str(parameter.dtype)[6:]}; parameters are float32")
    if parameter._post_accumulate_grad_hooks:
        raise ConfigError(
            f"{name} of the module has a hook for accumulated gradients, and none are accumulated here; "
            "use register_hook"
        )


_COUNTER = ("num_batches_tracked",)  # of batch norm
_STATISTICS = ("running_mean", "running_var", *_COUNTER)
_SAVE = "write it by torch.save(module.state_dict(), FILE), with the weights in it"


def read_weights(
    path: Path, module: nn.Module, head: str, num_classes: int, unread: tuple[str, ...] = _COUNTER
) -> dict[str, Tensor]:
    """Loads a state dict into a module; returns the weights of its head if they are for that many classes.

    Args:
        unread: last names of buffers that the module may lack.
    """
    state = read_state_dict(path)
    own = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    state = {name: value for name, value in state.items() if name in own or name.rpartition(".")[2] not in unread}
    adapters = {name for name in own if name.rpartition(".")[2] in ADAPTERS}
    if not adapters & state.keys():  # saved before the module got adapters
        own = {name: value for name, value in own.items() if name not in adapters}
    shapes = {name: list(value.shape) for name, value in own.items()}
    per_class = [name for name in (f"{head}.weight", f"{head}.bias") if name in own]
    shapes |= {name: [num_classes, *shapes[name][1:]] for name in per_class}
    in_head = {name for name in own if name.rpartition(".")[0] == head}
    rows = {state[name].shape[:1] for name in per_class if name in state}
    if not in_head & state.keys() or (in_head <= state.keys() and (num_classes,) not in rows):  # it is made anew
        state = {name: value for name, value in state.items() if name not in in_head}
        shapes = {name: shape for name, shape in shapes.items() if name not in in_head}
    for name in sorted(shapes.keys() | state.keys()):
        sides = [list(state[name].shape) if name in state else "missing", shapes.get(name, "missing")]
        if sides[0] != sides[1]:
            raise ConfigError(
                f"model.weights = {str(path)!r} is not of this model: {name} is {sides[0]}, here {sides[1]}"
            )
    _check_finite(path, state, dict(module.named_buffers()))
    with torch.no_grad():
        for name, value in own.items():
            if name not in in_head:
                value.copy_(state[name])
    return {name.rpartition(".")[2]: value.float() for name, value in state.items() if name in in_head}


def _check_finite(path: Path, state: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
    """Raises `ConfigError` for NaN, and for an infinity in a parameter; a buffer may be a mask of -inf."""
    for name, value in state.items():
        if (value.isnan() if name in buffers else ~value.float().isfinite()).any():
            raise ConfigError(f"model.weights = {str(path)!r}: {name} has a value that is not a finite number")


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Reads the tensors of a file .pt, .pth or .safetensors by name, on the host."""
    try:
        if path.suffix == ".safetensors":
            state = import_module("safetensors.torch").load_file(path)
        elif path.suffix in (".pt", ".pth"):
            state = torch.load(path, map_location="cpu", weights_only=True)
        else:
            raise ConfigError(f"model.weights = {str(path)!r}: unknown suffix; known: .pt, .pth, .safetensors")
    except ModuleNotFoundError as error:
        raise ConfigError(f"model.weights = {str(path)!r} needs {error.name}: pip install {error.name}") from error
    except ConfigError:
        raise
    except Exception as error:  # torch and safetensors raise a dozen kinds for damaged bytes
        problem = f"cannot be read: {first_line(error)};"
        if isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error):
            problem = "holds more than plain tensors, and nothing else is read:"
        raise ConfigError(f"model.weights = {str(path)!r} {problem} {_SAVE}") from error
    if not isinstance(state, dict):
        raise ConfigError(f"model.weights = {str(path)!r} holds a {type(state).__name__}, no state dict; {_SAVE}")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            described = f"{name!r} with a {type(value).__name__}"
            raise ConfigError(f"model.weights = {str(path)!r} is no state dict, it has {described}; {_SAVE}")
        if value.is_meta or value.is_quantized or value.layout != torch.strided or value.is_complex():
            described = "meta" if value.is_meta else f"{value.dtype}, {value.layout}"
            raise ConfigError(f"model.weights = {str(path)!r}: {name} has no plain numbers ({described}); {_SAVE}")
    return state
