"""The `data` and `partition` sections of a configuration."""

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr


class DataConfig(BaseModel):
    """The dataset, its location, and how a client's samples are split into training and test samples."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(description="the dataset; with a path: what to call it, and not as a dataset")
    path: str | None = Field(
        None, description="data of one's own: an .npz, .h5, .csv or .parquet, or a folder; null: by name"
    )
    label: str | list[str] | None = Field(
        None,
        description="column of the labels in a table, or several; null: label, y, class, target, or last of a .csv",
    )
    task: str = Field(
        "classification",
        description="what the labels are: classification, multilabel, regression, tokens, or ./my_file.py:Class",
    )
    client: str | None = Field(None, description="column of a table that says whose samples they are")
    layout: Literal["nchw", "nhwc"] | None = Field(
        None, description="axes of an array of one's own, channels first or last; null: as its shape tells, or as is"
    )
    normalize: Literal["fixed", "standard", "pixel"] = Field(
        "fixed",
        description="fixed: bytes by mean and deviation 0.5, other values as they are; standard: by the mean and "
        "standard deviation of all samples, per channel or column; pixel: by those of each pixel, in float32",
    )
    transform: list[str] = Field(
        [],
        description="random changes of training samples, in this order: random_crop, horizontal_flip, or "
        "./my_file.py:function",
    )
    root: str | None = Field(None, description="data folder; null for the environment variable PFLMPI_DATA")
    download: bool = Field(False, description="let torchvision fetch what is missing")
    split: Literal["auto", "pooled", "official"] = Field(
        "auto",
        description="pooled: pool all samples and split each client's; official: keep the official training and "
        "test sets apart; auto: official for data of one's own that marks test samples, else pooled",
    )
    test_share: float = Field(0.25, gt=0, lt=1, description="share of a client's pooled samples that are for testing")
    test_per_class: int | None = Field(
        None, ge=1, description="with split official: test samples of each class of a client; null: all"
    )
    validation: float = Field(
        0.0, ge=0, lt=1, description="share of a client's training samples kept out of training, to choose rounds by"
    )
    resident: Literal["auto", "device", "host"] = Field(
        "auto",
        description="where a GPU's samples are: device: all on it; host: in the host's memory, and those of the "
        "clients that are computed go up; auto: host if they take more than half of the GPU's memory",
    )
    limit: int | None = Field(None, ge=1, description="use only this many samples, from all classes")
    _options: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """The fields of a dataset from outside the package, which are keys of the section too."""
        return self._options

    def with_options(self, options: dict[str, Any]) -> "DataConfig":
        """The same section with the fields of a dataset from outside the package."""
        copy = self.model_copy()
        copy._options = options
        return copy

    def resolved(self) -> dict[str, Any]:
        """The section with every value, as written in YAML."""
        return {**self.model_dump(), **self._options}


@dataclass(frozen=True)
class PartitionConfig:
    """The `partition` section: a partition by name, or the path of a saved one."""

    name: str | None = None
    clients: int | None = None  # None for the natural number (all writers)
    parameters: dict[str, Any] = field(default_factory=dict)  # every parameter of the partition, defaults included
    path: str | None = None

    def resolved(self) -> dict[str, Any]:
        """The section with every value, as written in YAML."""
        if self.path is not None:
            return {"path": self.path}
        return {"name": self.name, "clients": self.clients, **self.parameters}
