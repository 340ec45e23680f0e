"""The convolutional network used by most work on personalised federated learning."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from pflmpi.models.base import Architecture, Model, Shape
from pflmpi.models.conv_net import ConvNet, check_size, pooled_side


@dataclass(frozen=True, kw_only=True)
class CNN(Model):
    """conv 5x5 (32), pool, conv 5x5 (64), pool, fc 512, fc K: the last layer is the head (FedGMH, FedFCD, pFedCFR).

    The first fully connected layer's inputs follow from the image: 1024 for 1x28x28, 1600 for 3x32x32. With K = 10
    the model has 582,026 and 878,538 parameters. Images of 8x8 need `kernel` 3 and `padding` 1. With `hidden: null` the
    head is the only fully connected layer (adaptive feature extraction on Fashion-MNIST and CIFAR-10), with
    `third_channels` a third convolution and pool come before it (on CIFAR-100).
    """

    name: ClassVar[str] = "cnn"
    summary: ClassVar[str] = "two convolutions and two fully connected layers (FedGMH, FedFCD)"

    first_channels: Annotated[int, Field(ge=1, le=4096, description="channels of the first convolution")] = 32
    second_channels: Annotated[int, Field(ge=1, le=4096, description="channels of the second convolution")] = 64
    third_channels: Annotated[
        int | None, Field(ge=1, le=4096, description="channels of a third convolution; null: there are two")
    ] = None
    hidden: Annotated[
        int | None,
        Field(ge=1, le=65536, description="width of the fully connected layer, d; null: convolutions and head alone"),
    ] = 512
    kernel: Annotated[int, Field(ge=1, le=31, description="side of the convolutions' kernels")] = 5
    padding: Annotated[int, Field(ge=0, le=30, description="zeros on each side of a convolution's input")] = 0

    def bind(self, shape: Shape, num_classes: int) -> Architecture:
        every = (self.first_channels, self.second_channels, self.third_channels)
        channels = tuple(one for one in every if one is not None)
        times = len(channels)
        check_size(self.name, shape, self.kernel, self.padding, times)
        height, width = (pooled_side(side, self.kernel, self.padding, times) for side in (*shape[1:], 1, 1)[:2])
        return ConvNet(
            name=self.name,
            shape=shape,
            num_classes=num_classes,
            num_features=self.hidden or channels[-1] * height * width,
            channels=channels,
            kernel=self.kernel,
            padding=(self.padding,) * times,
            pools=(True,) * times,
            widths=() if self.hidden is None else (self.hidden,),
        )
