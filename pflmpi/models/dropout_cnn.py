"""The two-convolution network with dropout of speed comparisons."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from pflmpi.models.base import Architecture, Model, Shape
from pflmpi.models.conv_net import ConvNet


@dataclass(frozen=True, kw_only=True)
class DropoutCNN(Model):
    """conv 3x3 (32), conv 3x3 (64), pool, dropout, fc 128, dropout, fc K (Reddi et al., 2021).

    The network of many speed comparisons on FEMNIST and MNIST: 1,199,882 parameters for 1x28x28 with K = 10, 1,206,590
    with K = 62. The masks follow from the batch's key, so that a run gives the same bits wherever it is computed.
    """

    name: ClassVar[str] = "dropout_cnn"
    summary: ClassVar[str] = "two convolutions with dropout (speed comparisons)"

    dropout: Annotated[float, Field(ge=0, lt=1, description="probability after the convolutions")] = 0.25
    head_dropout: Annotated[float, Field(ge=0, lt=1, description="probability before the head")] = 0.5

    def bind(self, shape: Shape, num_classes: int) -> Architecture:
        return ConvNet(
            name=self.name,
            shape=shape,
            num_classes=num_classes,
            num_features=128,
            channels=(32, 64),
            kernel=3,
            padding=(0, 0),
            pools=(False, True),
            widths=(128,),
            dropout=(self.dropout, self.head_dropout),
        )
