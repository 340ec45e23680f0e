"""The fields of an algorithm, model or dataset as keys of a configuration."""

import dataclasses
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.errors import PydanticUserError

from pflmpi import outside
from pflmpi.config.sections import check_values
from pflmpi.data.partitions import PARTITIONS
from pflmpi.errors import ConfigError
from pflmpi.text import first_line

_EXPECTED = "expected a number, text, true, false, null, or a list of these"


@cache  # hundreds of cells of a sweep have the same algorithm, model and partition
def fields_model(kind: type) -> type[BaseModel]:
    """Builds the pydantic model of a dataclass; `ConfigError` for a type that no configuration can hold."""
    hints = _hints(kind)
    fields: dict[str, Any] = {
        field.name: (hints[field.name], _default(field)) for field in dataclasses.fields(kind) if field.init
    }
    if "name" in fields:
        raise ConfigError(f"{_where(kind)}.name is a key already, which says what the section is; rename the field")
    return _model(kind, fields)


def partition_model(name: str) -> type[BaseModel]:
    """Builds the pydantic model of a partition's keys besides `name` from its signature; raises as `fields_model`."""
    return _partition_model(PARTITIONS[name])


@cache
def _partition_model(function: Callable[..., Any]) -> type[BaseModel]:
    hints = _hints(function)
    type_of_clients = hints.get("clients", int)
    if type(None) in get_args(type_of_clients):
        clients = Field(None, ge=1, description="number of clients, null for all")
    else:
        clients = Field(..., ge=1, description="number of clients")
    fields: dict[str, Any] = {"clients": (type_of_clients, clients)}
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            fields[key] = (hints[key], ... if parameter.default is parameter.empty else parameter.default)
    return _model(function, fields)


def _hints(kind: Any) -> dict[str, Any]:
    """Returns the types of the fields of a class, or of the arguments of a function."""
    try:
        return get_type_hints(kind, include_extras=True)
    except Exception as error:
        raise ConfigError(f"{_where(kind)}: the type of a field is unknown: {error}") from error


def _model(kind: Any, fields: dict[str, Any]) -> type[BaseModel]:
    """Builds a pydantic model of keys, each with its type and default; raises as `fields_model`."""
    try:
        return create_model(kind.__name__, __config__=ConfigDict(validate_default=True), **fields)
    except (PydanticUserError, ValueError, NameError) as error:
        raise ConfigError(f"{_where(kind)}: {first_line(error)}; {_EXPECTED}") from error


def plain(section: str, kind: type, values: BaseModel) -> dict[str, Any]:
    """Returns validated values for the fields of a class; raises `ConfigError` for one that YAML cannot hold."""
    fields = dict(values.__dict__)
    check_values(section, fields)
    for name, value in fields.items():
        if not _is_plain(value):
            raise ConfigError(
                f"{_where(kind)}.{name} = {value!r} is a {type(value).__name__}, which {section}.{name} cannot be; "
                f"{_EXPECTED}"
            )
    return fields


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return Field(default_factory=field.default_factory)
    return ... if field.default is dataclasses.MISSING else field.default


def _where(kind: Any) -> str:
    """Returns file and name of a class or function."""
    return f"{outside.file_of(kind)}: {kind.__qualname__}"
