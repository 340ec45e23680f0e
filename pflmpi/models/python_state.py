"""Finds what a torch module keeps outside its parameters and buffers: attributes, closures, globals, class attributes.

A model that changes any of these in a forward pass would share it between the clients of a rank, and a checkpoint would
lack it.
"""

import inspect
import itertools
import random
import types
from collections import deque
from collections.abc import Iterator, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pflmpi.errors import ConfigError
from pflmpi.models.module_parts import KeyedDropout

_MAX_DEPTH = 6  # attributes of attributes
_MAX_ITEMS = 10_000  # of a container
_LIBRARIES = (  # whose classes and functions are not searched
    "torch",
    "torchvision",
    "transformers",
    "numpy",
    "pflmpi",
    "builtins",
    "collections",
    "functools",
    "typing",
    "math",
    "random",
)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_OWN_OF_MODULES = ("_parameters", "_buffers", "_modules", "_flat_weights")  # attributes of nn.Module that hold tensors


def collect_python_state(module: nn.Module) -> dict[str, object]:
    """Returns values by name, such as "block.counter" or "global COUNT", without parameters and buffers.

    Raises:
        ConfigError: one is an iterator whose position cannot be read.
    """
    values: dict[str, object] = {}
    visited: dict[int, object] = {id(layer): layer for layer in module.modules()}
    for prefix, layer in module.named_modules():
        for key, value in vars(layer).items():
            if key not in _OWN_OF_MODULES and not (isinstance(layer, KeyedDropout) and key in KeyedDropout.of_pass):
                values.update(_walk(f"{prefix}.{key}" if prefix else key, value, visited, 0))
        for kind in type(layer).__mro__:
            values.update(_walk_class(kind, visited, 0))
    return values


def _walk(name: str, value: Any, visited: dict[int, object], depth: int) -> Iterator[tuple[str, object]]:
    """Yields (name, comparable value) of a value and of what it refers to."""
    if isinstance(value, _PLAIN):
        yield name, repr(value)
    elif id(value) in visited or depth > _MAX_DEPTH:
        return
    elif isinstance(value, Tensor):
        yield name, _to_bytes(value)
    elif isinstance(value, np.ndarray):
        yield name, (value.shape, value.tobytes())
    else:
        visited[id(value)] = value
        try:
            values = list(_walk_object(name, value, visited, depth + 1))
        except ConfigError:
            raise
        except Exception:  # an object whose attributes cannot be read
            return
        yield from values


def _walk_object(name: str, value: Any, visited: dict[int, object], depth: int) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        yield name, len(value)
        for key, item in list(value.items())[:_MAX_ITEMS]:
            yield from _walk(f"{name}[{key!r}]", item, visited, depth)
    elif isinstance(value, Set):
        yield name, sorted(map(repr, value))
    elif isinstance(value, random.Random | np.random.RandomState | torch.Generator):
        yield name, repr(value.get_state() if not isinstance(value, random.Random) else value.getstate())
    elif isinstance(value, np.random.Generator):
        yield name, repr(value.bit_generator.state)
    elif isinstance(value, list | tuple | deque):
        yield name, len(value)
        for index, item in enumerate(list(value)[:_MAX_ITEMS]):
            yield from _walk(f"{name}[{index}]", item, visited, depth)
    elif isinstance(value, types.MethodType):
        yield from _walk_object(name, value.__func__, visited, depth)
        yield from _walk(name, value.__self__, visited, depth)
    elif isinstance(value, types.FunctionType):
        yield from _walk_function(name, value, visited, depth)
    elif isinstance(value, type):
        yield from _walk_class(value, visited, depth)
    elif isinstance(value, itertools.count):
        yield name, repr(value)
    elif hasattr(type(value), "__next__") and not hasattr(value, "__dict__"):
        raise ConfigError(
            f"{name} of the module is a {type(value).__name__}: an iterator, whose place all clients of a rank would "
            "share, and which no checkpoint has; count in a buffer (register_buffer), and compute the value from that"
        )
    elif not isinstance(value, types.ModuleType):
        names = [*getattr(value, "__dict__", {}), *_list_slots(type(value))]
        for key in names:
            yield from _walk(f"{name}.{key}", getattr(value, key, None), visited, depth)
        yield from _walk_class(type(value), visited, depth)


def _list_slots(kind: type) -> list[str]:
    return [name for base in kind.__mro__ for name in getattr(base, "__slots__", ()) if isinstance(name, str)]


def _walk_class(kind: type, visited: dict[int, object], depth: int) -> Iterator[tuple[str, object]]:
    """Yields class attributes, and what the methods use, of a class that is not a library's."""
    if kind.__module__.partition(".")[0] in _LIBRARIES or id(kind) in visited:
        return
    visited[id(kind)] = kind
    for key, value in list(vars(kind).items()):
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        value = inspect.unwrap(value) if callable(value) else value
        if not (key.startswith("__") and not callable(value)):
            yield from _walk(f"{kind.__qualname__}.{key}", value, visited, depth)


def _walk_function(
    name: str, function: types.FunctionType, visited: dict[int, object], depth: int
) -> Iterator[tuple[str, object]]:
    """Yields the closure variables, defaults and globals that a function uses."""
    if (function.__module__ or "").partition(".")[0] in _LIBRARIES:
        return
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != types.CellType():
            yield from _walk(f"{key} of {name}", cell.cell_contents, visited, depth)
    for index, value in enumerate(function.__defaults__ or ()):
        yield from _walk(f"{name} (default {index})", value, visited, depth)
    for key in _list_names(function.__code__):
        if key in function.__globals__:
            yield from _walk(f"global {key}", function.__globals__[key], visited, depth)


def _list_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _list_names(constant)


def _to_bytes(value: Tensor) -> object:
    return (value.shape, value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
