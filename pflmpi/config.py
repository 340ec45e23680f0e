"""A configuration: read from YAML, overridden by `-s section.key=value`, validated, written back resolved."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml
from pydantic import BaseModel, ValidationError, create_model

from pflmpi.algorithms import ALGORITHMS
from pflmpi.algorithms.base import Algorithm
from pflmpi.data.config import DataConfig, PartitionConfig, validate_partition
from pflmpi.errors import ConfigError
from pflmpi.models import MODELS
from pflmpi.models.base import Model
from pflmpi.registry import Registry, unknown
from pflmpi.runtime.config import CheckpointConfig, EvaluationConfig, RuntimeConfig
from pflmpi.training import TrainingConfig

Section = TypeVar("Section", bound=BaseModel)
T = TypeVar("T")

SECTIONS: dict[str, type[BaseModel]] = {
    "data": DataConfig,
    "training": TrainingConfig,
    "evaluation": EvaluationConfig,
    "checkpoint": CheckpointConfig,
    "runtime": RuntimeConfig,
}
_KEYS = ["seed", "partition", "model", "algorithm", *SECTIONS]


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, as everybody expects."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)$|^[-+]?\d[\d_]*\.[\d_]*$|^[-+]?\.(inf|Inf|INF)$|^\.nan$"
    ),
    list("-+0123456789."),
)


@dataclass(frozen=True)
class Config:
    """A validated configuration; every value is there."""

    seed: int
    data: DataConfig
    partition: PartitionConfig
    models: tuple[Model, ...]  # cycled over the clients
    algorithm: Algorithm
    training: TrainingConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    runtime: RuntimeConfig

    def resolved(self) -> dict[str, Any]:
        """Return the whole configuration as plain values, as it is written into the run."""
        models = [_named(MODELS, model) for model in self.models]
        return {
            "seed": self.seed,
            "data": self.data.model_dump(),
            "partition": self.partition.resolved(),
            "model": models[0] if len(models) == 1 else models,
            "algorithm": _named(ALGORITHMS, self.algorithm),
            **{name: getattr(self, name).model_dump() for name in ("training", "evaluation", "checkpoint", "runtime")},
        }


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration in a YAML file, with `section.key=value` overrides applied."""
    return parse(override(read(path), overrides))


def read(path: Path) -> dict[str, Any]:
    """Return the raw contents of a YAML file."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot read the configuration {path}: {reason}") from error
    try:
        content = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no mapping; a configuration has the keys {', '.join(_KEYS)}")
    return content


def override(raw: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the raw configuration with each `section.key=value` (or `seed=value`) put in."""
    result = {key: dict(value) if isinstance(value, dict) else value for key, value in raw.items()}
    for text in overrides:
        path, equals, value = text.partition("=")
        section, _, key = path.partition(".")
        if not equals or not path:
            raise ConfigError(f"override {text!r} is not of the form section.key=value")
        if section not in _KEYS:
            raise ConfigError(unknown("section", section, _KEYS))
        try:
            parsed = yaml.load(value, _Loader)
        except yaml.YAMLError as error:
            raise ConfigError(f"override {text!r}: the value is not valid YAML") from error
        if not key:
            result[section] = parsed
        elif isinstance(result.get(section, {}), dict):
            result[section] = {**result.get(section, {}), key: parsed}
        else:
            raise ConfigError(
                f"override {text!r}: {section} is a list; give it whole, as {section}=[{{name: ...}}, ...]"
            )
    return result


def parse(raw: Mapping[str, Any]) -> Config:
    """Return the validated configuration."""
    for key in raw:
        if key not in _KEYS:
            raise ConfigError(unknown("key", str(key), _KEYS))
    seed = raw.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ConfigError(f"seed = {seed!r}: must be a whole number of at least 0")
    sections = {name: section(name, kind, raw.get(name, {})) for name, kind in SECTIONS.items()}
    model = raw.get("model", {"name": "cnn"})
    models = model if isinstance(model, list) else [model]
    if not models:
        raise ConfigError("model = []: give at least one architecture")
    return Config(
        seed=seed,
        partition=validate_partition(_mapping("partition", raw.get("partition", {}))),
        models=tuple(named("model", MODELS, value) for value in models),
        algorithm=named("algorithm", ALGORITHMS, raw.get("algorithm", {})),
        **sections,  # type: ignore[arg-type]
    )


def section(name: str, kind: type[Section], value: object) -> Section:
    """Return a validated section."""
    values = _mapping(name, value)
    _refuse_unknown(name, values, list(kind.model_fields))
    try:
        return kind.model_validate(values, strict=True)
    except ValidationError as error:
        raise ConfigError(explain(name, error)) from error


def named(name: str, registry: Registry[type[T]], value: object) -> T:
    """Return the object that a section with a `name` and the fields of that class describes."""
    values = _mapping(name, value)
    if not isinstance(values.get("name"), str):
        raise ConfigError(f"{name}.name is missing; known: {', '.join(registry)}")
    kind = registry[values.pop("name")]
    return kind(**section(name, fields_model(kind), values).__dict__)


def fields_model(kind: type) -> type[BaseModel]:
    """Return a pydantic model with the fields of a dataclass, their ranges and defaults."""
    hints = get_type_hints(kind, include_extras=True)
    fields: dict[str, Any] = {
        field.name: (hints[field.name], ... if field.default is dataclasses.MISSING else field.default)
        for field in dataclasses.fields(kind)
        if field.init
    }
    return create_model(kind.__name__, **fields)


def explain(name: str, error: ValidationError) -> str:
    """Return what is wrong in a section, each key with the value found and what is allowed."""
    lines = []
    for problem in error.errors():
        where = ".".join([name, *(str(part) for part in problem["loc"])])
        allowed = problem["msg"].replace("Input should be", "must be")
        found = "" if problem["type"] == "missing" else f" = {problem['input']!r}"
        lines.append(f"{where}{found}: {allowed[0].lower()}{allowed[1:]}")
    return "; ".join(lines)


def dump(values: Mapping[str, Any]) -> str:
    """Return plain values as YAML."""
    text: str = yaml.safe_dump(dict(values), sort_keys=False, default_flow_style=None, width=120)
    return text


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one from dotted key to value."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        result.update(flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return result


def _mapping(name: str, value: object) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} = {value!r}: must be a mapping, such as {{name: ...}}")
    return {str(key): item for key, item in value.items()}


def _refuse_unknown(name: str, values: Mapping[str, Any], known: list[str]) -> None:
    for key in values:
        if key not in known:
            raise ConfigError(unknown(f"key in {name}:", key, known))


def _named(registry: Registry[Any], value: Any) -> dict[str, Any]:
    name = next(name for name, kind in registry.items() if kind is type(value))
    return {"name": name, **dataclasses.asdict(value)}
