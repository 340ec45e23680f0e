"""Arguments of functions that scripts and notebooks call: of the type that is needed, or refused by name."""

import operator
from os import PathLike
from pathlib import Path
from typing import Any

from pflmpi.errors import ConfigError
from pflmpi.machine import expanded
from pflmpi.text import short_repr


def wrong_type(name: str, value: object, expected: str) -> ConfigError:
    """The error that says what an argument is, and what was expected."""
    return ConfigError(f"{name} = {short_repr(value)} is a {type(value).__name__}; expected {expected}")


def as_path(name: str, value: object, expected: str = "a path, as text or pathlib.Path") -> Path:
    """The path of an argument; raises `ConfigError` for what is none."""
    if isinstance(value, str | PathLike):
        return expanded(value)
    raise wrong_type(name, value, expected)


def as_integer(name: str, value: Any) -> int:
    """The integer of an argument, also of NumPy's; raises `ConfigError` for what is none."""
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} = {short_repr(value)}: must be a whole number") from None
