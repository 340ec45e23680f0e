"""The `data` and `partition` sections of a configuration."""

import inspect
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo

from pflmpi.data.partitions import PARTITIONS
from pflmpi.errors import ConfigError
from pflmpi.registry import unknown


class DataConfig(BaseModel):
    """The dataset, its location, and how a client's samples are split into training and test samples."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(description="the dataset")]
    root: Annotated[str | None, Field(description="data folder; null for the environment variable PFLMPI_DATA")] = None
    download: Annotated[bool, Field(description="let torchvision fetch what is missing")] = False
    split: Annotated[
        Literal["pooled", "official"],
        Field(
            description="pool all samples and split each client's, or keep the official training and test sets apart"
        ),
    ] = "pooled"
    test_share: Annotated[
        float, Field(gt=0, lt=1, description="share of a client's pooled samples that are for testing")
    ] = 0.25
    limit: Annotated[int | None, Field(ge=1, description="use only this many samples, from all classes")] = None


@dataclass(frozen=True)
class PartitionConfig:
    """The checked `partition` section: a partition by name, or the path of a saved one."""

    name: str | None = None
    clients: int | None = None  # None: the natural number (all writers)
    parameters: dict[str, Any] = field(default_factory=dict)  # every parameter of the partition, defaults filled in
    path: str | None = None

    def resolved(self) -> dict[str, Any]:
        """The section with every value, as written in YAML."""
        if self.path is not None:
            return {"path": self.path}
        return {"name": self.name, "clients": self.clients, **self.parameters}


def validate_partition(mapping: Mapping[str, object]) -> PartitionConfig:
    """The checked `partition` section: `{name, clients, <parameters>}` or `{path}`.

    Raises:
        ConfigError: an unknown name or key, a missing value, a wrong type, or a value out of range.
    """
    if "path" in mapping:
        return _saved(mapping)
    if not isinstance(mapping.get("name"), str):
        found = (
            f"partition.name = {mapping['name']!r} is not a name" if "name" in mapping else "partition.name is missing"
        )
        raise ConfigError(f"{found}; known: {', '.join(PARTITIONS)}; or give partition.path, a saved partition")
    name = str(mapping["name"])
    model = _model(name)
    values = {key: value for key, value in mapping.items() if key != "name"}
    for key, value in values.items():
        if key not in model.model_fields:
            raise ConfigError(unknown(f"key of partition {name!r}", str(key), list(model.model_fields)))
        # pydantic accepts true for 1, which nobody means.
        if isinstance(value, bool) and model.model_fields[key].annotation is not bool:
            raise ConfigError(
                f"partition.{key} = {value} is not allowed; it must be {_type_text(model.model_fields[key])}"
            )
    try:
        checked = model.model_validate(values)
    except ValidationError as error:
        raise ConfigError("; ".join(_sentence(name, model, problem) for problem in error.errors())) from None
    parameters = checked.model_dump()
    return PartitionConfig(name=name, clients=parameters.pop("clients"), parameters=parameters)


def partition_parameters(name: str) -> dict[str, tuple[str, str, str]]:
    """Parameters of a partition: key -> (type and range, default or "required", description)."""
    fields = {key: info for key, info in _model(name).model_fields.items() if key != "clients"}
    return {
        key: (_type_text(info), "required" if info.is_required() else str(info.default), info.description or "")
        for key, info in fields.items()
    }


def _saved(mapping: Mapping[str, object]) -> PartitionConfig:
    others = sorted(str(key) for key in mapping if key != "path")
    if others:
        names = ", ".join(f"partition.{key}" for key in others)
        raise ConfigError(f"partition.path must be the only key: the saved partition has everything; remove {names}")
    path = mapping["path"]
    if not isinstance(path, str) or not path:
        raise ConfigError(f"partition.path = {path!r} is not a file name; give the path of a saved partition")
    return PartitionConfig(path=path)


def _model(name: str) -> type[BaseModel]:
    """Pydantic model of a partition's section, made from the function's signature."""
    function = PARTITIONS[name]
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    natural = type(None) in get_args(hints["clients"])
    about = "number of clients" + (", null for all" if natural else "")
    fields["clients"] = (hints["clients"], Field(default=None if natural else ..., ge=1, description=about))
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            required = parameter.default is parameter.empty
            fields[key] = (hints[key], ... if required else parameter.default)
    return create_model(f"partition_{name}", __config__=ConfigDict(extra="forbid", frozen=True), **fields)


def _sentence(name: str, model: type[BaseModel], problem: Any) -> str:
    key = str(problem["loc"][0])
    wanted = _type_text(model.model_fields[key])
    if problem["type"] == "missing":
        return f"partition.{key} is missing: partition {name!r} needs it, {wanted}"
    return f"partition.{key} = {problem['input']!r} is not allowed; it must be {wanted}"


def _type_text(info: FieldInfo) -> str:
    """Type and range of a field, such as `int >= 1`."""
    annotation: Any = info.annotation
    options = get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    kind = " or ".join("null" if option is type(None) else option.__name__ for option in options)
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    limits = [
        f"{sign} {getattr(part, bound)}"
        for bound, sign in signs.items()
        for part in info.metadata
        if getattr(part, bound, None) is not None
    ]
    return " ".join([kind, ", ".join(limits)]).strip()
