"""Configurations: read from YAML, overridden by `-s section.key=value`, validated, and resolved to plain values."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from pflmpi import outside
from pflmpi.algorithms import ALGORITHMS
from pflmpi.algorithms.base import Algorithm
from pflmpi.config.fields import fields_model, partition_model, plain
from pflmpi.config.sections import KEYS, located, mapping, override, section
from pflmpi.config.yaml_file import read
from pflmpi.data.config import DataConfig, PartitionConfig
from pflmpi.data.partitions import PARTITIONS
from pflmpi.data.sources import SOURCES
from pflmpi.data.task_kinds import TASK_KINDS
from pflmpi.errors import ConfigError
from pflmpi.learning.measures import load_measures
from pflmpi.learning.participation import SELECTIONS, is_trace
from pflmpi.learning.training import TrainingConfig
from pflmpi.learning.transforms import TRANSFORMS
from pflmpi.messages.uplink_transforms import UplinkConfig
from pflmpi.models import MODELS
from pflmpi.models.base import Model
from pflmpi.registry import Registry, format_unknown_name
from pflmpi.runtime.config import CheckpointConfig, EvaluationConfig, OutputConfig, RuntimeConfig
from pflmpi.text import short_repr

T = TypeVar("T")

SECTIONS: dict[str, type[BaseModel]] = {
    "data": DataConfig,
    "training": TrainingConfig,
    "uplink": UplinkConfig,
    "evaluation": EvaluationConfig,
    "checkpoint": CheckpointConfig,
    "output": OutputConfig,
    "runtime": RuntimeConfig,
}


@dataclass(frozen=True)
class Config:
    """A validated configuration; every value is set."""

    seed: int
    data: DataConfig
    partition: PartitionConfig
    models: tuple[Model, ...]  # cycled over the clients
    algorithm: Algorithm
    training: TrainingConfig
    uplink: UplinkConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    output: OutputConfig
    runtime: RuntimeConfig

    def __hash__(self) -> int:
        """Hash of all values, so that configurations can be keys of dictionaries."""
        return hash(json.dumps(self.resolved(), sort_keys=True))

    def resolved(self) -> dict[str, Any]:
        """Returns the whole configuration as plain values, as written into the run."""
        models = [_named(MODELS, model) for model in self.models]
        return {
            "seed": self.seed,
            "data": self.data.resolved(),
            "partition": self.partition.resolved(),
            "model": models[0] if len(models) == 1 else models,
            "algorithm": _named(ALGORITHMS, self.algorithm),
            **{name: getattr(self, name).model_dump() for name in SECTIONS if name != "data"},
        }


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Reads the configuration in a YAML file, with `section.key=value` overrides applied.

    Files are relative to the folder of the configuration; in an override, to the working directory. The section
    `recorded` of RUN/config.yaml is ignored, so that the file can be used for other runs.
    """
    raw = {key: value for key, value in read(path).items() if key != "recorded"}
    return parse(override(located(raw, path.parent), overrides))


def parse(raw: Mapping[str, Any]) -> Config:
    """Validates a configuration; loads the code from outside the package that it names."""
    with outside.as_config_error():
        config = _parse(located(raw, Path()))
        for name in config.data.transform:
            TRANSFORMS[name]
        if not is_trace(config.training.selection):
            SELECTIONS[config.training.selection]
        if config.evaluation.measures is None:
            default = [*TASK_KINDS[config.data.task].default_measures]
            config = replace(config, evaluation=config.evaluation.model_copy(update={"measures": default}))
        load_measures(config.evaluation.measures or ())
        return config


def _parse(raw: Mapping[str, Any]) -> Config:
    for key in raw:
        if key not in KEYS:
            raise ConfigError(format_unknown_name("key", str(key), list(KEYS)))
    seed = raw.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:  # as YAML is read
        raise ConfigError(f"seed = {short_repr(seed)}: must be a whole number from 0 to 2^63 - 1")
    sections = {name: section(name, kind, raw.get(name, {})) for name, kind in SECTIONS.items() if name != "data"}
    model = raw.get("model", {"name": "cnn"})
    models = model if isinstance(model, list) else [model]
    if not models:
        raise ConfigError("model = []: give at least one architecture")
    return Config(
        seed=seed,
        data=_data(raw.get("data", {})),
        partition=partition(raw.get("partition", {})),
        models=tuple(build_named("model", MODELS, value) for value in models),
        algorithm=_algorithm(raw.get("algorithm", {})),
        **sections,  # type: ignore[arg-type]
    )


def partition(value: object) -> PartitionConfig:
    """Validates the `partition` section: `{name, clients, <parameters>}`, or `{path}` for a saved partition."""
    values = mapping("partition", value)
    if "path" in values:
        path = values.pop("path")
        if values:
            others = ", ".join(f"partition.{key}" for key in sorted(values))
            raise ConfigError(f"partition.path must be the only key: a saved partition has everything; remove {others}")
        if not isinstance(path, str) or not path:
            raise ConfigError(
                f"partition.path = {short_repr(path)} is not a file name; give the path of a saved partition"
            )
        return PartitionConfig(path=path)
    if not isinstance(values.get("name"), str):
        problem = f"= {short_repr(values['name'])} is not a name" if "name" in values else "is missing"
        raise ConfigError(
            f"partition.name {problem}; known: {', '.join(PARTITIONS)}; or give partition.path, a saved partition"
        )
    name = values.pop("name")
    parameters = section("partition", partition_model(name), values).model_dump()
    return PartitionConfig(name=name, clients=parameters.pop("clients"), parameters=parameters)


def build_named(name: str, registry: Registry[type[T]], value: object) -> T:
    """Builds the object that a section describes: its class by `name`, and values for its fields."""
    values = mapping(name, value)
    if not isinstance(values.get("name"), str):
        problem = f"= {short_repr(values['name'])} is not a name" if "name" in values else "is missing"
        raise ConfigError(f"{name}.name {problem}; known: {', '.join(registry)}")
    chosen = values.pop("name")
    kind = registry[chosen]
    if issubclass(kind, Model):
        kind.check_keys(values)
    keys = fields_model(kind)  # type: ignore[arg-type]  # to mypy no type[T] is hashable
    for key in values:
        if key not in keys.model_fields:
            instead = f"for {chosen} without the keys of another: -s '{name}={{name: {chosen}}}'"
            raise ConfigError(f"{format_unknown_name(f'key in {name}:', key, list(keys.model_fields))}; {instead}")
    return kind(**plain(name, kind, section(name, keys, values)))


def _algorithm(value: object) -> Algorithm:
    """Validates the `algorithm` section; refuses a value that has no effect beside the others."""
    algorithm: Algorithm = build_named("algorithm", ALGORITHMS, value)
    fields = fields_model(type(algorithm)).model_fields
    for name, (other, *values) in algorithm.without_effect().items():
        if (chosen := getattr(algorithm, name)) != fields[name].get_default(call_default_factory=True):
            raise ConfigError(
                f"algorithm.{name} = {short_repr(chosen)} has an effect with algorithm.{other} = "
                f"{' or '.join(map(short_repr, values))} only; leave it out, or set that"
            )
    return algorithm


def _named(registry: Registry[Any], value: Any) -> dict[str, Any]:
    return {"name": registry.name_of(type(value)), **dataclasses.asdict(value)}


def _data(value: object) -> DataConfig:
    """Validates the `data` section, in which the fields of a class from outside the package are keys too."""
    values = mapping("data", value)
    if isinstance(values.get("path"), str):
        if unused := [key for key in ("root", "download") if values.get(key)]:
            raise ConfigError(f"data.{unused[0]} with data.path, which is the data already; leave one of them out")
        if values.get("name") in (None, *SOURCES):  # the name of the dataset that the path replaces
            values["name"] = Path(values["path"]).stem
        return section("data", DataConfig, values)
    if unused := [key for key in ("label", "client", "layout") if values.get(key) is not None]:
        raise ConfigError(f"data.{unused[0]} is about data.path, which is not set; set it, or leave the key out")
    name = values.get("name")
    if not isinstance(name, str) or not outside.is_reference(SOURCES.reference(name) or ""):
        return section("data", DataConfig, values)
    kind = SOURCES[name]
    assert isinstance(kind, type)
    fields = fields_model(kind)
    if repeated := sorted(fields.model_fields.keys() & DataConfig.model_fields.keys()):
        raise ConfigError(
            f"data: {kind.__qualname__}.{repeated[0]} is a key of the data section already; rename the field"
        )
    common = {key: value for key, value in values.items() if key in DataConfig.model_fields}
    options = section("data", fields, {key: value for key, value in values.items() if key not in common})
    return section("data", DataConfig, common).with_options(plain("data", kind, options))
