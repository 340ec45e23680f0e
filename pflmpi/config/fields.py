"""The fields of an algorithm, model or dataset as keys of a configuration."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Set
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from pflmpi import outside
from pflmpi.config.sections import check_values, explain
from pflmpi.data.partitions import PARTITIONS
from pflmpi.errors import ConfigError
from pflmpi.text import first_line

_EXPECTED = "expected a number, text, true, false, null, or a list of these"


@cache  # hundreds of cells of a sweep have the same algorithm, model and partition
def fields_model(kind: type) -> type[BaseModel]:
    """Builds the pydantic model of a dataclass: its fields with their ranges and defaults.

    Raises:
        ConfigError: a type that no configuration can hold, or a default that is not allowed; names file, class and
            field.
    """
    hints = _hints(kind)
    fields: dict[str, Any] = {
        field.name: (hints[field.name], _default(field)) for field in dataclasses.fields(kind) if field.init
    }
    if "name" in fields:
        raise ConfigError(f"{_where(kind)}.name is a key already, which says what the section is; rename the field")
    return _model(kind, fields)


def partition_model(name: str) -> type[BaseModel]:
    """Builds the pydantic model of a partition's keys besides `name` from the function's signature.

    Raises:
        ConfigError: as `fields_model`.
    """
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
        model: type[BaseModel] = create_model(kind.__name__, **fields)
    except (PydanticUserError, ValueError, NameError) as error:
        raise ConfigError(f"{_where(kind)}{_find_unusable(fields)}: {first_line(error)}") from error
    _check_fields(_where(kind), model)
    return model


def _check_fields(where: str, model: type[BaseModel]) -> None:
    """Raise `ConfigError` for a type or default that no YAML file can set: a run that wrote it could not be resumed."""
    for name, field in model.model_fields.items():
        if unwritable := next(_unwritable_types(field.annotation), None):
            raise ConfigError(f"{where}.{name} is a {unwritable}, which no key can be; {_EXPECTED}")
    optional = {name: field for name, field in model.model_fields.items() if not field.is_required()}
    defaults = {name: field.get_default(call_default_factory=True) for name, field in optional.items()}
    check_values(where, defaults)
    fields: dict[str, Any] = {name: (field.annotation, field) for name, field in optional.items()}
    try:
        create_model(model.__name__, **fields).model_validate(defaults, strict=True)
    except ValidationError as error:
        raise ConfigError(f"{explain(where, model, error)}; change its default") from error


def plain(section: str, kind: type, values: BaseModel) -> dict[str, Any]:
    """Returns validated values for the fields of a class; raises `ConfigError` for one that YAML cannot hold."""
    fields = dict(values.__dict__)
    for name, value in fields.items():
        if not _is_plain(value):
            raise ConfigError(
                f"{_where(kind)}.{name} = {value!r} is a {type(value).__name__}, which {section}.{name} cannot be; "
                f"{_EXPECTED}"
            )
    return fields


def _unwritable_types(annotation: Any) -> Iterator[str]:
    """Yield the types within a type of which YAML has no values: tuples, sets and mappings."""
    kind = get_origin(annotation) or annotation
    if annotation == dict[str, bool | int | float | str]:
        return
    if isinstance(kind, type) and issubclass(kind, tuple | Mapping | Set):
        yield str(annotation) if get_args(annotation) else kind.__name__
    for part in get_args(annotation):
        yield from _unwritable_types(part)


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


def _find_unusable(fields: dict[str, Any]) -> str:
    """Returns the first field that cannot be a key, and what can; "" without any."""
    for name, field in fields.items():
        try:
            create_model("one", **{name: field})
        except (PydanticUserError, ValueError, NameError):
            return (
                f".{name} cannot be a key of a configuration; expected int, float, bool, str, Literal[...], or | None"
            )
    return ""


def _where(kind: Any) -> str:
    """Returns file and name of a class or function."""
    return f"{outside.file_of(kind)}: {kind.__qualname__}"
