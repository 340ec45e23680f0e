"""LeNet-5 and the two-convolution network with dropout of speed comparisons."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from pflmpi.errors import ConfigError
from pflmpi.models.base import Architecture, Model, Shape
from pflmpi.models.initial import conv, linear
from pflmpi.models.noise import dropped
from pflmpi.models.two_conv import channels_last
from pflmpi.tree import Tree, leaf, part


@dataclass(frozen=True, kw_only=True)
class Layers(Architecture):
    """Two convolutions, each with a ReLU and some with a 2x2 max-pool, then fully connected layers with a ReLU.

    Attributes:
        channels: output channels of the convolutions.
        kernel: side of their kernels.
        padding: zeros around the image, in the first convolution.
        pools: whether a pool follows each of them.
        widths: of the fully connected layers.
        dropout: probabilities after the convolutions, and after the last fully connected layer; 0 for none.
    """

    has_convolution: ClassVar[bool] = True

    channels: tuple[int, int]
    kernel: int
    padding: int
    pools: tuple[bool, bool]
    widths: tuple[int, ...]
    dropout: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        self.require_images()
        if min(self.sides) < 1:
            height, width = self.shape[1:]
            raise ConfigError(
                f"model {self.name} cannot use images of {height}x{width}: nothing is left of them after its "
                "convolutions and pools; choose model mlp, which takes any size"
            )

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width after the convolutions."""
        height, width = self.shape[1:]
        for number, pooled in enumerate(self.pools):
            height, width = (
                side + (2 * self.padding if number == 0 else 0) - self.kernel + 1 for side in (height, width)
            )
            height, width = (side // (2 if pooled else 1) for side in (height, width))
        return height, width

    @property
    def layers(self) -> tuple[str, ...]:
        return "body/conv1", "body/conv2", *(f"body/fc{i}" for i in range(1, len(self.widths) + 1)), "head"

    def init(self, rng: np.random.Generator) -> Tree:
        first, second = self.channels
        body: Tree = {
            "conv1": conv(rng, self.shape[0], first, self.kernel),
            "conv2": conv(rng, first, second, self.kernel),
        }
        inputs = second * self.sides[0] * self.sides[1]
        for number, width in enumerate(self.widths, start=1):
            body[f"fc{number}"] = linear(rng, inputs, width)
            inputs = width
        return {"body": body, "head": linear(rng, self.num_features, self.num_classes)}

    def features(self, params: Tree, x: Tensor, training: bool) -> Tensor:
        body = part(params, "body")
        x = x if x.is_cuda else channels_last(x)
        for name, padding, pooled in zip(("conv1", "conv2"), (self.padding, 0), self.pools, strict=True):
            layer = part(body, name)
            x = F.conv2d(x, leaf(layer, "weight"), leaf(layer, "bias"), padding=padding)
            x = F.relu(F.max_pool2d(x, 2) if pooled else x)
        x = self._drop(params, x, 0, training).flatten(1)
        for number in range(1, len(self.widths) + 1):
            layer = part(body, f"fc{number}")
            x = F.relu(F.linear(x, leaf(layer, "weight"), leaf(layer, "bias")))
        return self._drop(params, x, 1, training)

    def _drop(self, params: Tree, x: Tensor, place: int, training: bool) -> Tensor:
        p = self.dropout[place]
        return dropped(x, self.noise_key(params), p, place) if training and p else x


@dataclass(frozen=True, kw_only=True)
class NoisyLayers(Layers):
    """The same with dropout."""

    draws_noise: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class LeNet(Model):
    """LeNet-5 with ReLU and max-pools: conv 5x5 (6), pool, conv 5x5 (16), pool, fc 120, fc 84, fc K.

    61,706 parameters for 1x28x28 (which is padded to 32x32) and 62,006 for 3x32x32, with K = 10.
    """

    name: ClassVar[str] = "lenet"
    summary: ClassVar[str] = "LeNet-5 with ReLU, 61,706 parameters for 1x28x28"

    def bind(self, shape: Shape, num_classes: int) -> Architecture:
        return Layers(
            name=self.name,
            shape=shape,
            num_classes=num_classes,
            num_features=84,
            channels=(6, 16),
            kernel=5,
            padding=max(0, (32 - max(shape[1:])) // 2),
            pools=(True, True),
            widths=(120, 84),
        )


@dataclass(frozen=True, kw_only=True)
class DropoutCNN(Model):
    """conv 3x3 (32), conv 3x3 (64), pool, dropout, fc 128, dropout, fc K (Reddi et al., 2021).

    The network of many speed comparisons on FEMNIST and MNIST: 1,199,882 parameters for 1x28x28 with K = 10, 1,206,590
    with K = 62. The masks follow from the batch's key, so that a run gives the same bits wherever it is computed.
    """

    name: ClassVar[str] = "dropout_cnn"
    summary: ClassVar[str] = "2 convolutions and dropout, 1,199,882 parameters for 1x28x28 (speed comparisons)"

    dropout: Annotated[float, Field(ge=0, lt=1, description="probability after the convolutions")] = 0.25
    head_dropout: Annotated[float, Field(ge=0, lt=1, description="probability before the head")] = 0.5

    def bind(self, shape: Shape, num_classes: int) -> Architecture:
        return NoisyLayers(
            name=self.name,
            shape=shape,
            num_classes=num_classes,
            num_features=128,
            channels=(32, 64),
            kernel=3,
            padding=0,
            pools=(False, True),
            widths=(128,),
            dropout=(self.dropout, self.head_dropout),
        )
