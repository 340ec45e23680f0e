"""What a function depends on besides its arguments: its code, and the values that it closes over."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from pflmpi.vmap_lanes import of_all_lanes

_VALUES = (bool, int, float, str, bytes, type, Enum, CodeType, BaseModel, torch.dtype, torch.device, type(None))
_UNKNOWN = object()
_DEEPEST = 12


def contents(function: Callable[..., Any]) -> Hashable:
    """What decides what a function computes, but for its arguments and the values of tensors; None if not known.

    >>> def times(factor):
    ...     return lambda x: factor * x
    >>> contents(times(2)) == contents(times(2)) != contents(times(3))
    True
    """
    parts = [(path, type(value), value) for path, value in _walk(function, "", 0) if not isinstance(value, Tensor)]
    return None if any(value is _UNKNOWN for _, _, value in parts) else tuple(parts)


def name_of(tensor: Tensor, function: Callable[..., Any]) -> str:
    """The name of what a function closes over that has the memory of a tensor; "" if there is none."""
    memory = tensor.untyped_storage()._cdata
    inside = ((path, value) for path, value in _walk(function, "", 0) if isinstance(value, Tensor))
    return next((path for path, value in inside if of_all_lanes(value).untyped_storage()._cdata == memory), "")


def _walk(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """(path, value) of everything that a value is made of."""
    if isinstance(value, (*_VALUES, Tensor)):
        yield path, value
        return
    parts: dict[str, Any] | None = None
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        defaults = {"defaults": value.__defaults__, "keywords": value.__kwdefaults__}
        parts = {"code": value.__code__, **defaults, **{name: cell.cell_contents for name, cell in cells}}
    elif isinstance(value, MethodType):
        parts = {"function": value.__func__, "self": value.__self__}
    elif isinstance(value, Mapping):
        parts = {str(key): item for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        parts = {str(place): item for place, item in enumerate(value)}
    elif is_dataclass(value):
        parts = {item.name: getattr(value, item.name) for item in fields(value) if item.compare}
    if parts is None or depth == _DEEPEST:
        yield path, _UNKNOWN
        return
    yield path, type(value)
    for name, item in parts.items():
        yield from _walk(item, f"{path}.{name}" if path else name, depth + 1)
