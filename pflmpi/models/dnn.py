"""The network of two fully connected layers that pFedCFR calls DNN."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from pflmpi.models.mlp import MLP


@dataclass(frozen=True, kw_only=True)
class DNN(MLP):
    """Two fully connected layers with a ReLU between: a feature layer (the body) and a decision layer (the head).

    The paper says "2-layer fully connected units" with one of the two fused as a feature layer (r = 1), so it has
    one hidden layer and the shape of `mlp`. It gives no width: 100 is read here, as in `mlp`. The names stay apart,
    so that a configuration says which paper it follows.
    """

    name: ClassVar[str] = "dnn"
    summary: ClassVar[str] = "two fully connected layers (pFedCFR on MNIST and Fashion-MNIST)"

    hidden: Annotated[int, Field(ge=1, le=65536, description="width of the feature layer, d")] = 100
