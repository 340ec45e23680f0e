"""The small convolutional network of prototype methods, in several widths with equal features."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from pflmpi.models.base import Architecture, Model, Shape
from pflmpi.models.conv_net import ConvNet, check_size


@dataclass(frozen=True, kw_only=True)
class ProtoCNN(Model):
    """conv 5x5 (10), pool, conv 5x5 (`channels`), pool, fc 50, fc K: the last layer is the head (pFedPM, FedProto).

    Clients may differ in `channels` (18, 20 or 22 in pFedPM's "-mh" runs, cycling over clients): d = 50 for all, so
    their class means agree in shape.

    The paper gives neither activations nor dropout. Assumed here: a ReLU after each convolution's pool and after the
    layer of 50, whose output is the feature; no dropout, which would need random numbers in the forward pass.
    """

    name: ClassVar[str] = "protocnn"
    summary: ClassVar[str] = "small 2-conv network with 50 features in several widths (pFedPM)"

    channels: Annotated[int, Field(ge=1, le=4096, description="channels of the second convolution")] = 20
    kernel: Annotated[int, Field(ge=1, le=31, description="side of the convolutions' kernels")] = 5
    padding: Annotated[int, Field(ge=0, le=30, description="zeros on each side of a convolution's input")] = 0

    def bind(self, shape: Shape, num_classes: int) -> Architecture:
        check_size(self.name, shape, self.kernel, self.padding)
        return ConvNet(
            name=self.name,
            shape=shape,
            num_classes=num_classes,
            num_features=50,
            channels=(10, self.channels),
            kernel=self.kernel,
            padding=(self.padding, self.padding),
            pools=(True, True),
            widths=(50,),
        )
