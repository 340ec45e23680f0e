"""Convolutions and fully connected layers: `cnn`, `protocnn`, `lenet` and `dropout_cnn`, of one architecture."""

from dataclasses import dataclass
from math import prod
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from pflmpi.errors import ConfigError
from pflmpi.models.base import Architecture, Model, Shape, require_images
from pflmpi.models.layers import affine, conv, linear
from pflmpi.models.noise import apply_dropout
from pflmpi.tree import Tree, leaf, part


@dataclass(frozen=True, kw_only=True)
class ConvNet(Architecture):
    """Blocks of convolution, 2x2 max-pool and ReLU, then fully connected layers with a ReLU each; head d - K.

    Attributes:
        channels: output channels of each convolution.
        kernel: side of their kernels.
        padding: zeros added on each side of the input of each of them.
        pools: whether each of them has a pool.
        widths: of the fully connected layers, the last one d; without any, the features are the flattened images.
        dropout: probabilities after the convolutions, and after the fully connected layers; 0 for none.
    """

    has_convolution: ClassVar[bool] = True

    channels: tuple[int, ...]
    kernel: int
    padding: tuple[int, ...]
    pools: tuple[bool, ...]
    widths: tuple[int, ...]
    dropout: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        require_images(self.name, self.shape)
        if min(self.pooled) < 1:
            height, width = self.shape[1:]
            raise ConfigError(
                f"model {self.name} cannot use images of {height}x{width}: nothing is left of them after its "
                "convolutions and pools; choose model mlp, which takes any size, or for 8x8 and larger cnn or protocnn "
                "with model.kernel = 3 and model.padding = 1"
            )

    @property
    def draws_noise(self) -> bool:  # type: ignore[override]
        return any(self.dropout)

    @property
    def layers(self) -> tuple[str, ...]:
        return *(f"body/{name}" for name in (*self._convolutions, *self._fully_connected)), "head"

    @property
    def pooled(self) -> tuple[int, int]:
        """Height and width after all convolutions and pools; 0 or less if nothing is left."""
        height, width = self.shape[1:]
        for padding, pool in zip(self.padding, self.pools, strict=True):
            height, width = (_block_side(side, self.kernel, padding, pool) for side in (height, width))
        return height, width

    def init(self, rng: np.random.Generator) -> Tree:
        body: Tree = {}
        before = (self.shape[0], *self.channels)
        for name, inputs, outputs in zip(self._convolutions, before, self.channels, strict=False):
            body[name] = conv(rng, inputs, outputs, self.kernel)
        inputs = self.channels[-1] * self.pooled[0] * self.pooled[1]
        for name, width in zip(self._fully_connected, self.widths, strict=True):
            body[name] = linear(rng, inputs, width)
            inputs = width
        return {"body": body, "head": linear(rng, self.num_features, self.num_classes)}

    def features(self, params: Tree, x: Tensor, training: bool) -> Tensor:
        body = part(params, "body")
        x = channels_last(x) if x.is_cpu else x
        for name, padding, pool in zip(self._convolutions, self.padding, self.pools, strict=True):
            x = _block(part(body, name), x, padding, pool)
        x = self._drop(params, x, 0, training).flatten(1)  # in the order C, H, W
        for name in self._fully_connected:
            x = F.relu(affine(part(body, name), x))
        return self._drop(params, x, 1, training)

    @property
    def _convolutions(self) -> tuple[str, ...]:
        return tuple(f"conv{number}" for number in range(1, len(self.channels) + 1))

    @property
    def _fully_connected(self) -> tuple[str, ...]:
        return tuple(f"fc{number}" for number in range(1, len(self.widths) + 1))

    def _drop(self, params: Tree, x: Tensor, layer: int, training: bool) -> Tensor:
        p = self.dropout[layer]
        return apply_dropout(x, self.noise_key(params), p, layer) if training and p else x


def _check_padding(kernel: int, padding: int) -> None:
    if padding >= kernel:
        raise ConfigError(
            f"model.padding = {padding} is not smaller than model.kernel = {kernel}, so that windows would see zeros "
            f"alone; choose at most {kernel - 1} ({kernel // 2} keeps the image's size)"
        )


def channels_last(x: Tensor) -> Tensor:
    """Returns images [B, C, H, W] with the channels innermost in memory, the layout of fast CPU convolutions.

    Measured with one thread, a batch of 100 and an SGD step: 1.4 times the samples per second in float32 and 1.5
    in bfloat16 for 3x32x32, 1.3 and 1.7 for 1x28x28; weights in this order gain nothing more. Unlike
    `contiguous(memory_format=...)` it works inside `vmap`, and on one channel, where that call changes nothing
    because both orders are the same memory, and the convolution then takes the slow path.
    """
    if x.shape[1] == 1:
        return x.reshape(x.shape[0], x.shape[2], x.shape[3], 1).permute(0, 3, 1, 2)
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def _pooled_side(side: int, kernel: int, padding: int, times: int) -> int:
    """Returns the side of an image after `times` convolutions and pools; 0 or less if nothing is left."""
    for _ in range(times):
        side = _block_side(side, kernel, padding)
    return side


def _block_side(side: int, kernel: int, padding: int, pool: bool = True) -> int:
    """Returns the side of an image after one convolution and its pool."""
    return (side + 2 * padding - kernel + 1) // (2 if pool else 1)


def _block(layer: Tree, x: Tensor, padding: int, pool: bool) -> Tensor:
    x = F.conv2d(x, leaf(layer, "weight"), leaf(layer, "bias"), padding=padding)
    if not x.is_cpu:
        x = x.contiguous()  # no copy here, but in lanes it saves one in the pool and one in its gradient
    return F.relu(F.max_pool2d(x, 2) if pool else x)  # the ReLU last: a quarter of the work, with the same bits


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
        channels: tuple[int, ...] = (self.first_channels, self.second_channels)
        if self.third_channels is not None:
            channels += (self.third_channels,)
        times = len(channels)
        _check_padding(self.kernel, self.padding)
        area = prod(_pooled_side(side, self.kernel, self.padding, times) for side in shape[1:])
        return ConvNet(
            name=self.name,
            shape=shape,
            num_classes=num_classes,
            num_features=self.hidden or channels[-1] * area,
            channels=channels,
            kernel=self.kernel,
            padding=(self.padding,) * times,
            pools=(True,) * times,
            widths=() if self.hidden is None else (self.hidden,),
        )


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


@dataclass(frozen=True, kw_only=True)
class LeNet(Model):
    """LeNet-5 with ReLU and max-pools: conv 5x5 (6), pool, conv 5x5 (16), pool, fc 120, fc 84, fc K.

    61,706 parameters for 1x28x28 (which is padded to 32x32) and 62,006 for 3x32x32, with K = 10.
    """

    name: ClassVar[str] = "lenet"
    summary: ClassVar[str] = "LeNet-5 with ReLU, 61,706 parameters for 1x28x28"

    def bind(self, shape: Shape, num_classes: int) -> Architecture:
        require_images(self.name, shape)
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
        _check_padding(self.kernel, self.padding)
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
