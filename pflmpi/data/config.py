"""The `data` and `partition` sections of a configuration."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr


class DataConfig(BaseModel):
    """The dataset, its location, and how a client's samples are split into training and test samples."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(description="the dataset; with a path: what to call it, and not as a dataset")]
    path: Annotated[
        str | None,
        Field(description="data of one's own: an .npz, .h5, .csv or .parquet, or a folder; null: by name"),
    ] = None
    label: Annotated[
        str | list[str] | None,
        Field(
            description="column of the labels in a table, or several; null: label, y, class, target, or last of a .csv"
        ),
    ] = None
    task: Annotated[
        str,
        Field(description="what the labels are: classification, multilabel, regression, tokens, or ./my_file.py:Class"),
    ] = "classification"
    client: Annotated[str | None, Field(description="column of a table that says whose samples they are")] = None
    layout: Annotated[
        Literal["nchw", "nhwc"] | None,
        Field(description="axes of an array of one's own, channels first or last; null: as its shape tells, or as is"),
    ] = None
    normalize: Annotated[
        Literal["fixed", "standard", "pixel"],
        Field(
            description="fixed: bytes by mean and deviation 0.5, other values as they are; standard: by the mean and "
            "standard deviation of all samples, per channel or column; pixel: by those of each pixel, in float32"
        ),
    ] = "fixed"
    transform: Annotated[
        list[str],
        Field(
            description="random changes of training samples, in this order: random_crop, horizontal_flip, or "
            "./my_file.py:function"
        ),
    ] = []
    root: Annotated[str | None, Field(description="data folder; null for the environment variable PFLMPI_DATA")] = None
    download: Annotated[bool, Field(description="let torchvision fetch what is missing")] = False
    split: Annotated[
        Literal["auto", "pooled", "official"],
        Field(
            description="pooled: pool all samples and split each client's; official: keep the official training and "
            "test sets apart; auto: official for data of one's own that marks test samples, else pooled"
        ),
    ] = "auto"
    test_share: Annotated[
        float, Field(gt=0, lt=1, description="share of a client's pooled samples that are for testing")
    ] = 0.25
    test_per_class: Annotated[
        int | None, Field(ge=1, description="with split official: test samples of each class of a client; null: all")
    ] = None
    validation: Annotated[
        float,
        Field(ge=0, lt=1, description="share of a client's training samples kept out of training, to choose rounds by"),
    ] = 0.0
    resident: Annotated[
        Literal["auto", "device", "host"],
        Field(
            description="where a GPU's samples are: device: all on it; host: in the host's memory, and those of the "
            "clients that are computed go up; auto: host if they take more than half of the GPU's memory"
        ),
    ] = "auto"
    limit: Annotated[int | None, Field(ge=1, description="use only this many samples, from all classes")] = None
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
    """The `partition` section: a partition by name, or the path of a saved one.

    Attributes:
        clients: None for the natural number (all writers).
        parameters: every parameter of the partition, defaults included.
    """

    name: str | None = None
    clients: int | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    path: str | None = None

    def resolved(self) -> dict[str, Any]:
        """The section with every value, as written in YAML."""
        if self.path is not None:
            return {"path": self.path}
        return {"name": self.name, "clients": self.clients, **self.parameters}
