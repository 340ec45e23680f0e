"""Checks the types of arguments of functions that scripts and notebooks call."""

import operator
from os import PathLike
from pathlib import Path
from typing import Any

from pflmpi.errors import ConfigError
from pflmpi.machine import expand_path
from pflmpi.text import short_repr


def wrong_type(name: str, value: object, expected: str) -> ConfigError:
    """Returns the error for an argument of the wrong type."""
    return ConfigError(f"{name} = {short_repr(value)} is a {type(value).__name__}; expected {expected}")


def as_path(name: str, value: object, expected: str = "a path, as text or pathlib.Path") -> Path:
    """Converts an argument to a path; raises `ConfigError` for anything else."""
    if isinstance(value, str | PathLike):
        return expand_path(value)
    raise wrong_type(name, value, expected)


def as_integer(name: str, value: Any) -> int:
    """Converts an argument to an integer, also NumPy's; raises `ConfigError` for anything else."""
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} = {short_repr(value)}: must be a whole number") from None
