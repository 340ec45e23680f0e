"""A configuration in Python: a keyword for each section, validated at once."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from types import FunctionType
from typing import Any

from pydantic import BaseModel

from pflmpi import atomic
from pflmpi.algorithms import ALGORITHMS
from pflmpi.algorithms.base import Algorithm
from pflmpi.config import load, yaml_file
from pflmpi.config.argument_checks import as_path
from pflmpi.config.fields import fields_model, partition_model
from pflmpi.config.main_source import reference
from pflmpi.config.sections import KEYS, NAMED, merge
from pflmpi.data.config import DataConfig, PartitionConfig
from pflmpi.data.partitions import PARTITIONS
from pflmpi.data.sources import SOURCES
from pflmpi.data.task_kinds import TASK_KINDS
from pflmpi.errors import ConfigError
from pflmpi.learning.measures import MEASURES
from pflmpi.learning.participation import SELECTIONS
from pflmpi.learning.training import TrainingConfig
from pflmpi.learning.transforms import TRANSFORMS
from pflmpi.messages.uplink_transforms import UplinkConfig
from pflmpi.models import MODELS
from pflmpi.models.base import Model
from pflmpi.registry import Registry
from pflmpi.runtime.config import CheckpointConfig, EvaluationConfig, OutputConfig, RuntimeConfig
from pflmpi.text import short_repr

Section = Mapping[str, Any]  # keys as in YAML
Code = Callable[..., object]  # a class or function of one's own
_REGISTRIES: dict[str, Registry[Any]] = {
    "data": SOURCES,
    "partition": PARTITIONS,
    "model": MODELS,
    "algorithm": ALGORITHMS,
    "data.transform": TRANSFORMS,
    "data.task": TASK_KINDS,
    "evaluation.measures": MEASURES,
    "training.selection": SELECTIONS,
}


class Config(load.Config):
    """A configuration from keywords; each section is a mapping as in YAML, a name, a class, or an object such as
    `FedGMH()`.

    A mapping may have classes and functions in place of their names. Files are relative to the working directory. It
    cannot be changed; `replace` makes another.

    Raises:
        ConfigError: an unknown key, or a value that is not allowed; says what is.

    >>> config = Config(data="digits", partition={"name": "iid", "clients": 4}, algorithm="fedavg")
    >>> config.replace(training={"rounds": 3}).training.rounds, config.training.rounds
    (3, 30)
    """

    def __init__(
        self,
        *,
        data: "DataConfig | Section | str | Code",
        partition: "PartitionConfig | Section | str | Code",
        algorithm: "Algorithm | Section | str | Code",
        model: "Model | Section | str | Code | Sequence[Model | Section | str | Code]" = "cnn",
        seed: int = 0,
        training: "TrainingConfig | Section | None" = None,
        uplink: "UplinkConfig | Section | None" = None,
        evaluation: "EvaluationConfig | Section | None" = None,
        checkpoint: "CheckpointConfig | Section | None" = None,
        output: "OutputConfig | Section | None" = None,
        runtime: "RuntimeConfig | Section | None" = None,
    ) -> None:
        sections: dict[str, Any] = {"training": training, "evaluation": evaluation, "checkpoint": checkpoint}
        sections |= {"data": data, "partition": partition, "model": model, "algorithm": algorithm}
        sections |= {"uplink": uplink, "output": output, "runtime": runtime}
        raw = {key: _plain(key, value) for key, value in sections.items() if value is not None}
        self._copy_fields(load.parse({"seed": _value(seed), **raw}))

    def _copy_fields(self, config: load.Config) -> None:
        for field in dataclasses.fields(config):
            object.__setattr__(self, field.name, getattr(config, field.name))

    def __repr__(self) -> str:
        """The call that makes it, without default values."""
        raw = self._without_default_measures()
        kinds = {**load.SECTIONS, "algorithm": fields_model(type(self.algorithm))}
        if self.partition.name is not None:
            kinds["partition"] = partition_model(self.partition.name)
        models = [
            _without_defaults(
                {"name": MODELS.name_of(type(model)), **dataclasses.asdict(model)}, fields_model(type(model))
            )
            for model in self.models
        ]
        sections = {**raw, **{name: _without_defaults(raw[name], kind) for name, kind in kinds.items()}}
        sections["model"] = models[0] if len(models) == 1 else models
        words = [f"{name}={sections[name]!r}" for name in KEYS if sections[name] not in ({}, "cnn")]
        return f"Config({', '.join(words)})"

    @classmethod
    def load(cls, path: "str | PathLike[str]") -> "Config":
        """Reads a YAML file."""
        config = cls.__new__(cls)
        config._copy_fields(load.load(as_path("path", path)))
        return config

    def save(self, path: "str | PathLike[str]") -> None:
        """Write the whole configuration into a YAML file, for `load`, `pflmpi run` and others; replaces the file."""
        with atomic.explain_write_error(path, "choose another path"):
            atomic.write(as_path("path", path), yaml_file.dump(self.resolved()).encode())

    def replace(self, **sections: Any) -> "Config":
        """Returns the configuration with other sections; one without a `name` changes only the keys that it has."""
        return Config(**merged(self._without_default_measures(), sections))

    def _without_default_measures(self) -> dict[str, Any]:
        """Returns all values, but null for the default measures of `data.task`: another task has others."""
        raw = self.resolved()
        if raw["evaluation"]["measures"] == [*TASK_KINDS[self.data.task].default_measures]:
            raw["evaluation"] = {**raw["evaluation"], "measures": None}
        return raw


def merged(raw: Mapping[str, Any], sections: Mapping[str, Any]) -> dict[str, Any]:
    """Merges sections, as `Config` takes them, into a raw configuration."""
    return merge(raw, {key: _value(value) if key == "seed" else _plain(key, value) for key, value in sections.items()})


def _plain(section: str, value: Any) -> Any:
    """Converts the value of a section to what YAML would hold."""
    if isinstance(value, str) and section in NAMED:
        return value
    if isinstance(value, Algorithm):
        return {"name": _name(section, ALGORITHMS, type(value)), **dataclasses.asdict(value)}
    if isinstance(value, Model):
        return {"name": _name(section, MODELS, type(value)), **dataclasses.asdict(value)}
    if isinstance(value, DataConfig | PartitionConfig):
        return value.resolved()
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, type | FunctionType) and section in _REGISTRIES:
        return _name(section, _REGISTRIES[section], value)
    if isinstance(value, Mapping):
        return {str(key): _item(section if key == "name" else f"{section}.{key}", item) for key, item in value.items()}
    if isinstance(value, list | tuple) and section == "model":
        return [_plain(section, item) for item in value]
    raise ConfigError(f"{section} = {short_repr(value)}: give its keys as a mapping, such as {section}={{...}}")


def _without_defaults(section: dict[str, Any], kind: type[BaseModel]) -> Any:
    """Returns the values of a section that differ from the defaults; the name alone if it is the only one."""
    defaults = kind.model_construct().model_dump()  # without the keys that are required
    values = {key: value for key, value in section.items() if key not in defaults or value != defaults[key]}
    return values["name"] if values.keys() == {"name"} else values


def _item(key: str, value: Any) -> Any:
    """The value of a section's key, with names in place of classes and functions."""
    if isinstance(value, type | FunctionType) and key in _REGISTRIES:
        return _name(key, _REGISTRIES[key], value)
    return [_item(key, item) for item in value] if isinstance(value, list | tuple) else _value(value)


def _value(value: Any) -> Any:
    if isinstance(value, PathLike):
        return str(value)
    if isinstance(value, list | tuple):
        return [_value(item) for item in value]
    return value.item() if getattr(value, "shape", None) == () else value  # a NumPy number


def _name(section: str, registry: Registry[Any], kind: Any) -> str:
    """Returns the registered name of a class or function, or `file:Class` or `module:Class`."""
    try:
        return registry.name_of(kind)
    except KeyError:
        return reference(section, kind)
