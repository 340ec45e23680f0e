"""LeNet-5."""

from dataclasses import dataclass
from typing import ClassVar

from pflmpi.models.base import Architecture, Model, Shape
from pflmpi.models.conv_net import ConvNet


@dataclass(frozen=True, kw_only=True)
class LeNet(Model):
    """LeNet-5 with ReLU and max-pools: conv 5x5 (6), pool, conv 5x5 (16), pool, fc 120, fc 84, fc K.

    61,706 parameters for 1x28x28 (which is padded to 32x32) and 62,006 for 3x32x32, with K = 10.
    """

    name: ClassVar[str] = "lenet"
    summary: ClassVar[str] = "LeNet-5 with ReLU, 61,706 parameters for 1x28x28"

    def bind(self, shape: Shape, num_classes: int) -> Architecture:
        return ConvNet(
            name=self.name,
            shape=shape,
            num_classes=num_classes,
            num_features=84,
            channels=(6, 16),
            kernel=5,
            padding=(max(0, (32 - max(shape[1:])) // 2), 0),
            pools=(True, True),
            widths=(120, 84),
        )
