"""The placeholder that stands for the head in the body of a torch module."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pflmpi.errors import ConfigError


def replace_head(module: nn.Module, name: str) -> None:
    """Replaces a module's head by a placeholder that returns the features and has the sizes of the head."""
    head = module.get_submodule(name)
    assert isinstance(head, nn.Linear)
    module.set_submodule(name, _HeadPlace(head, name))


class _HeadPlace(nn.Module):
    """Returns its input; of the head it has only what the heads of all clients have in common."""

    def __init__(self, head: nn.Linear, name: str) -> None:
        super().__init__()
        self._name, self.in_features, self.out_features = name, head.in_features, head.out_features
        self.weight, self.bias = (_Valueless.like(value, name) for value in (head.weight, head.bias))

    def forward(self, z: Tensor) -> Tensor:
        return z

    def __getattr__(self, key: str) -> Any:
        raise AttributeError(_error_text(self._name, f".{key}"))


class _Valueless(Tensor):
    """Has the shape, dtype and device of a tensor; anything that computes with its values raises `ConfigError`."""

    _head: str

    @classmethod
    def like(cls, value: Tensor, head: str) -> Tensor:
        """Makes one for a parameter of the head."""
        result = torch.empty((), dtype=value.dtype, device=value.device).expand(value.shape).as_subclass(cls)
        result._head = head
        return result

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function in _WITHOUT_VALUES or (function in _CONVERSIONS and not isinstance(args[0], cls)):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        values = [*args, *(kwargs or {}).values()]
        head = next((value._head for value in values if isinstance(value, cls)), "its head")
        raise ConfigError(_error_text(head, "'s values"))


_WITHOUT_VALUES = (
    *(getattr(Tensor, name).__get__ for name in ("device", "dtype", "shape", "ndim", "is_cuda")),
    *(getattr(Tensor, name) for name in ("size", "dim", "get_device", "__len__", "is_floating_point")),
    *(getattr(Tensor, name) for name in ("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")),
)
_CONVERSIONS = (Tensor.to, Tensor.type_as)  # of another tensor, to the dtype and device of the placeholder's


def _error_text(head: str, what: str) -> str:
    return (
        f"forward of the module reads {head}{what} besides calling it; of a head the body may read in_features, "
        "out_features, and shape, dtype and device of weight and bias"
    )
