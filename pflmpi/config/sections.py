"""Sections of a configuration as plain values: merged, overridden, and validated one by one."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from pflmpi import outside
from pflmpi.config import yaml_file
from pflmpi.errors import ConfigError
from pflmpi.machine import expand_path
from pflmpi.registry import format_unknown_name
from pflmpi.text import UNSTORABLE, for_shell, join_truncated, short_repr

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Section = TypeVar("Section", bound=BaseModel)

_LARGEST_INT = 2**31 - 1  # of int32, to which every array and library can count
_LARGEST_FLOAT = 3.4e38  # of float32, the dtype of models
KEYS = (
    "seed",
    "data",
    "partition",
    "model",
    "algorithm",
    "training",
    "uplink",
    "evaluation",
    "checkpoint",
    "output",
    "runtime",
)
NAMED = ("data", "partition", "model", "algorithm")  # a name alone is short for {name: ...}


def merge(raw: Mapping[str, Any], sections: Mapping[str, Any]) -> dict[str, Any]:
    """Merges sections into a raw configuration.

    A section with a `name` (a partition also with a `path`), a list or a scalar replaces the old value; any other is
    merged key by key.

    >>> merge({"model": {"name": "mlp", "hidden": 9}}, {"model": {"hidden": 5}, "training": {"lr": 0.1}})
    {'model': {'name': 'mlp', 'hidden': 5}, 'training': {'lr': 0.1}}
    """
    result = dict(raw)
    for name, value in sections.items():
        before = result.get(name)
        if value is None and before and isinstance(before, Mapping):
            raise ConfigError(
                f"{name} is null, in place of {', '.join(before)}; give the keys that are to change, or leave it out"
            )
        partial = isinstance(value, Mapping) and "name" not in value and not (name == "partition" and "path" in value)
        if before is not None and partial:
            if not isinstance(before, Mapping):
                raise ConfigError(
                    f"{name} = {short_repr(value)} cannot be merged with {short_repr(before)}; "
                    "give the whole section, with its name"
                )
            value = {**before, **value}
        result[name] = value
    return result


def located(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Makes the files and folders in a raw configuration absolute.

    A folder that begins with `~` or `$NAME` stays as it is: it may differ between nodes.

    Args:
        folder: to which relative paths are relative.
    """
    sections = {name: _locate_object(value, folder) if name in NAMED else value for name, value in raw.items()}
    for name, keys in (("data", ("root",)), ("runtime", ("cache", "scratch"))):
        if isinstance(part := sections.get(name), Mapping):
            sections[name] = {**part, **_locate_folders(part, keys, folder)}
    for name in ("data", "partition"):
        part = sections.get(name)
        if isinstance(part, Mapping) and isinstance(part.get("path"), str) and part["path"]:
            sections[name] = {**part, "path": os.path.abspath(expand_path(part["path"], folder))}
    for name, key in (("training", "selection"), ("data", "task")):
        part = sections.get(name)
        if isinstance(part, Mapping) and isinstance(value := part.get(key), str):
            path = os.path.abspath(expand_path(value, folder)) if value.endswith(".csv") else value
            sections[name] = {**part, key: outside.make_absolute(path, folder)}
    for name, key in (("data", "transform"), ("evaluation", "measures"), ("output", "trackers")):
        part = sections.get(name)
        if isinstance(part, Mapping) and isinstance(part.get(key), list):
            items = [
                outside.make_absolute(item, folder) if isinstance(item, str) else _locate_object(item, folder)
                for item in part[key]
            ]
            sections[name] = {**part, key: items}
    return sections


def _locate_object(section: Any, folder: Path) -> Any:
    """Makes the files in a section with a `name`, or in a list of these, absolute."""
    if isinstance(section, list):
        return [_locate_object(item, folder) for item in section]
    if isinstance(section, str):
        section = {"name": section}
    if not (isinstance(section, Mapping) and isinstance(section.get("name"), str)):
        return section
    absolute = {"name": outside.make_absolute(section["name"], folder)}
    if isinstance(section.get("weights"), str):
        absolute["weights"] = os.path.abspath(expand_path(section["weights"], folder))
    if section["name"] == "mlflow" and "://" not in str(section.get("store")):
        absolute |= _locate_folders(section, ("store",), folder)
    return {**section, **absolute}


def _locate_folders(section: Mapping[str, Any], keys: Sequence[str], folder: Path) -> dict[str, str]:
    """Returns the folders under these keys, made absolute."""
    texts = {key: section[key] for key in keys if isinstance(section.get(key), str)}
    return {key: os.path.abspath(Path(folder, text)) for key, text in texts.items() if text[:1] not in ("~", "$", "")}


def override(raw: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Applies each `section.key=value`, `section=value` (see `merge`) or `seed=value` to a raw configuration."""
    result = {key: dict(value) if isinstance(value, dict) else value for key, value in raw.items()}
    paths: list[str] = []  # of the overrides so far
    for text in overrides:
        path, equals, value = text.partition("=")
        section, dot, key = path.partition(".")
        if not equals or not path or (dot and not key):
            raise ConfigError(f"override {short_repr(text)} is not of the form section.key=value")
        if section not in KEYS:
            raise ConfigError(format_unknown_name("section", section, list(KEYS)))
        if earlier := next((other for other in paths if other.startswith(f"{path}.")), None):
            raise ConfigError(f"override {short_repr(text)} comes after that of {earlier}, a key of it; give it first")
        paths.append(path)
        parsed = _parse_value(path, value)
        if not key:
            whole = {"name": parsed} if section in NAMED and isinstance(parsed, str) else parsed
            result = merge(result, {section: whole})
        elif isinstance(result.get(section) or {}, dict) and section != "seed":
            result[section] = _set_key(result.get(section) or {}, key, parsed)
        elif isinstance(result.get(section), list):
            raise ConfigError(
                f"override {short_repr(text)}: {section} is a list; give the whole list, as {section}=[{{name: ...}}, "
                "...]"
            )
        else:
            instead = f"give it without a key, as {section}=..."
            raise ConfigError(f"override {short_repr(text)}: {section} is a single value and has no keys; {instead}")
    return result


def _parse_value(path: str, value: str) -> Any:
    """Parses the value of an override; raises if there is none, or if a comment would cut it."""
    where = f"override {short_repr(f'{path}={value}')}"
    if not value.strip():
        raise ConfigError(f"{where} has no value after the =; give one, or null for none")
    parsed = yaml_file.parse(value, f"{where}: the value")
    if yaml_file.ends_with_comment(value):
        quoted = for_shell(f"{path}={json.dumps(value, ensure_ascii=False)}")
        raise ConfigError(f"{where}: from # on it is a comment; leave that out, or quote the text: {quoted}")
    return parsed


def _set_key(values: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Returns the values with a key set; `stop.patience` is a key of the mapping `stop`."""
    outer, dot, inner = key.partition(".")
    if dot and isinstance(values.get(outer) or {}, Mapping):
        return {**values, outer: _set_key(values.get(outer) or {}, inner, value)}
    return {**values, key: value}


def section(name: str, kind: type[Section], value: object) -> Section:
    """Validates a section."""
    values = mapping(name, value)
    for key in values:
        if key not in kind.model_fields:
            raise ConfigError(format_unknown_name(f"key in {name}:", key, list(kind.model_fields)))
    check_values(name, values)
    try:
        return kind.model_validate(values, strict=True)
    except ValidationError as error:
        raise ConfigError(explain(name, kind, error)) from error


def check_values(where: str, value: object) -> None:
    """Raise `ConfigError` for NaN, numbers that are too large for any key, and texts that no file can hold."""
    if isinstance(value, Mapping | list):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            check_values(f"{where}.{key}", item)
    elif isinstance(value, str) and UNSTORABLE.search(value):
        raise ConfigError(f"{where} = {short_repr(value)}: has a character that no file can hold; leave it out")
    elif isinstance(value, int | float):
        most = _LARGEST_INT if isinstance(value, int) else _LARGEST_FLOAT
        if value != value:
            raise ConfigError(f"{where} = {value}: must be a finite number")
        if abs(value) > most:
            limit = f"at most {most}" if value > 0 else f"at least -{most}"
            raise ConfigError(f"{where} = {value}: no option takes such a number; must be {limit}")


def mapping(name: str, value: object) -> dict[str, Any]:
    """Returns the keys and values of a section; none for null."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} = {short_repr(value)}: must be a mapping, such as {{name: ...}}")
    return {str(key): item for key, item in value.items()}


def find_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the keys in which two mappings differ, ascending, with both values; None for a missing one."""
    pairs = {key: (old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys())}
    return {key: (before, now) for key, (before, now) in pairs.items() if before != now}


def by_key(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens sections to values by `section.key`; a section without keys is under its name.

    >>> by_key({"seed": 0, "training": {"rounds": 3, "stop": {"patience": 2}}})
    {'seed': 0, 'training.rounds': 3, 'training.stop': {'patience': 2}}
    """
    result: dict[str, Any] = {}
    for name, section in values.items():
        if isinstance(section, dict):
            result |= {f"{name}.{key}": value for key, value in section.items()}
        else:
            result[name] = section
    return result


def explain(name: str, kind: type[BaseModel], error: ValidationError) -> str:
    """Formats a validation error: each wrong key with its value and what is allowed."""
    lines = []
    for problem in error.errors():
        *outer, key = map(str, problem["loc"])
        model, where = _nested_model(kind, outer), ".".join([name, *outer, key])
        if problem["type"] == "missing":
            lines.append(f"{where} is missing: {model.model_fields[key].description or 'give a value'}")
        elif problem["type"] == "extra_forbidden":
            other = format_unknown_name(f"key in {'.'.join([name, *outer])}:", key, list(model.model_fields))
            lines.append(f"{where} is not permitted: {other}")
        else:
            lines.append(f"{where} = {short_repr(problem['input'])}: {_format_allowed(problem, model, key)}")
    return join_truncated(lines, separator="; ")


def _format_allowed(problem: "ErrorDetails", model: type[BaseModel], key: str) -> str:
    """Formats what a key may be instead."""
    if problem["type"] == "list_type":
        return f"must be a list, such as [{problem['input']}]"
    if problem["type"] in ("bool_type", "bool_parsing"):
        return "must be true or false"
    field = model.model_fields.get(key)
    if problem["type"] == "model_type" and field is not None and (keys := nested(field.annotation)):
        return f"must be a mapping, such as {{{next(iter(keys.model_fields))}: ...}}, or null"
    allowed = problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return f"{allowed[0].lower()}{allowed[1:]}"


def nested(annotation: Any) -> type[BaseModel] | None:
    """Returns the model of a key that is itself a mapping; None for other keys."""
    choices = get_args(annotation) or (annotation,)
    return next((choice for choice in choices if isinstance(choice, type) and issubclass(choice, BaseModel)), None)


def _nested_model(kind: type[BaseModel], path: Sequence[str]) -> type[BaseModel]:
    for key in path:
        kind = (nested(kind.model_fields[key].annotation) if key in kind.model_fields else None) or kind
    return kind
