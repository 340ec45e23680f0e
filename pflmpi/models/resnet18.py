"""ResNet-18: torchvision's module without its own weights, called on trees."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from pflmpi.errors import ConfigError
from pflmpi.models.base import Architecture, Model, Shape, require_images
from pflmpi.models.conv_net import channels_last
from pflmpi.models.layers import kaiming_normal, linear, uniform
from pflmpi.models.module_parts import flatten_names, unflatten_names
from pflmpi.tree import Tree, part
from pflmpi.vmap_lanes import in_lane

POOLED_FEATURES = 512


@dataclass(frozen=True, kw_only=True)
class ResidualNetwork(Architecture):
    """torchvision's ResNet-18; the head is its last layer, `fc`; body and statistics keep torchvision's names.

    With `hidden` a fully connected layer with a ReLU precedes the head, as `fc/0` of the body.
    """

    has_batch_norm: ClassVar[bool] = True
    has_convolution: ClassVar[bool] = True
    trains_channels_last: ClassVar[bool] = True  # a CPU's step takes 9 % less time in float32, 5 % in bfloat16

    stem: str  # "imagenet" is a 7x7 convolution and a 3x3 max-pool, "small" a 3x3 convolution
    stem_stride: int  # of the first convolution
    pool_stride: int  # of the max-pool; 1 without one
    first_stage_stride: int  # of the first residual block
    hidden: int | None  # width of the layer between pool and head, d; None: no such layer, and d is 512
    # Skeletons on the device "meta": only names and shapes. One per mode, so that no call changes either.
    _training: nn.Module = field(init=False, repr=False, compare=False)
    _evaluation: nn.Module = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_images(self.name, self.shape)
        object.__setattr__(self, "_training", self._skeleton().train())
        object.__setattr__(self, "_evaluation", self._skeleton().eval())

    @property
    def layers(self) -> tuple[str, ...]:
        # torchvision registers its modules in call order, a shortcut after the two convolutions it spans.
        owners = dict.fromkeys(name.rpartition(".")[0] for name, _ in self._training.named_parameters())
        return *("body/" + name.replace(".", "/") for name in owners), "head"

    def init(self, rng: np.random.Generator) -> Tree:
        weights = {
            name: _draw_initial(rng, name, tuple(weight.shape)) for name, weight in self._training.named_parameters()
        }
        stats = {
            name: torch.full(buffer.shape, float(name.endswith("running_var")))
            for name, buffer in self._training.named_buffers()
        }
        return {
            "body": unflatten_names(weights),
            "head": linear(rng, self.num_features, self.num_classes),
            "stats": unflatten_names(stats),
        }

    def features(self, params: Tree, x: Tensor, training: bool) -> Tensor:
        if training and x.shape[0] == 1 and self._last_size() == (1, 1):
            raise ConfigError(
                f"model {self.name} cannot train on a batch of one image of {self.shape[1]}x{self.shape[2]}: its last "
                "layers see one pixel, and batch norm needs more than one value; "
                "choose training.drop_last = true, another training.batch_size, or smaller strides"
            )
        # vmap has no batching rule for the average pool of images with channels last (PyTorch 2.14): it warns.
        x = channels_last(x) if x.is_cpu and not in_lane(x) else x
        weights = {**flatten_names(part(params, "body")), **flatten_names(part(params, "stats"))}
        z = torch.func.functional_call(self._training if training else self._evaluation, weights, (x,), strict=True)
        assert isinstance(z, Tensor)
        return z

    def _last_size(self) -> tuple[int, int]:
        stride = self.stem_stride * self.pool_stride * self.first_stage_stride * 8
        return -(-self.shape[1] // stride), -(-self.shape[2] // stride)

    def _skeleton(self) -> nn.Module:
        from torchvision.models import resnet  # here: it takes longer to import than torch, and few runs need it

        with torch.device("meta"):
            module: nn.Module = resnet.resnet18()
            kernel = 7 if self.stem == "imagenet" else 3
            module.conv1 = nn.Conv2d(self.shape[0], 64, kernel, self.stem_stride, kernel // 2, bias=False)
            module.maxpool = nn.MaxPool2d(3, self.pool_stride, 1) if self.stem == "imagenet" else nn.Identity()
            if self.first_stage_stride > 1:
                shortcut = nn.Sequential(resnet.conv1x1(64, 64, self.first_stage_stride), nn.BatchNorm2d(64))
                module.set_submodule("layer1.0", resnet.BasicBlock(64, 64, self.first_stage_stride, shortcut))
            module.fc = nn.Identity()
            if self.hidden is not None:
                module.fc = nn.Sequential(nn.Linear(POOLED_FEATURES, self.hidden), nn.ReLU())
        for layer in module.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.num_batches_tracked = None  # not needed: the running averages have a constant momentum, 0.1
        return module


@dataclass(frozen=True, kw_only=True)
class ResNet18(Model):
    """torchvision's ResNet-18, d = 512, with a stem for small images by default (CIFAR-10 and CIFAR-100 in the papers).

    In pFedPM's "-mh" runs clients differ in the strides; d stays 512. Which ones it does not say; FedProto, whose
    setting it takes over, has the stem `imagenet` with `stem_stride` and `pool_stride` 2 and 2, or 1 and 4. A first
    stage with a stride gets the shortcut that the later stages have (1x1 convolution and batch norm).

    With `hidden` the body ends in a fully connected layer of that width with a ReLU, so that the decision part has two
    layers and the model 64 tensors, as pFedCFR counts them (60 of convolutions and batch norms, and 4).
    """

    name: ClassVar[str] = "resnet18"
    summary: ClassVar[str] = "ResNet-18 with batch norm (pFedPM, FedFCD, pFedCFR)"

    stem: Annotated[
        Literal["imagenet", "small"],
        Field(description="first layers: 7x7 convolution and max-pool, or a 3x3 convolution for small images"),
    ] = "small"
    stem_stride: Annotated[
        int | None, Field(ge=1, le=4, description="stride of the first convolution; null: 2 for imagenet, 1 for small")
    ] = None
    pool_stride: Annotated[
        int | None, Field(ge=1, le=4, description="stride of the max-pool of the stem imagenet; null: 2")
    ] = None
    first_stage_stride: Annotated[int, Field(ge=1, le=4, description="stride of the first residual block")] = 1
    hidden: Annotated[
        int | None, Field(ge=1, le=65536, description="width of a fully connected layer before the head, d; null: none")
    ] = None

    def bind(self, shape: Shape, num_classes: int) -> Architecture:
        if self.stem == "small" and self.pool_stride is not None:
            raise ConfigError(
                f"model.pool_stride = {self.pool_stride}, but the stem small has no max-pool; set model.stem: imagenet"
            )
        return ResidualNetwork(
            name=self.name,
            shape=shape,
            num_classes=num_classes,
            num_features=self.hidden or POOLED_FEATURES,
            stem=self.stem,
            stem_stride=self.stem_stride or (2 if self.stem == "imagenet" else 1),
            pool_stride=(self.pool_stride or 2) if self.stem == "imagenet" else 1,
            first_stage_stride=self.first_stage_stride,
            hidden=self.hidden,
        )


def _draw_initial(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Tensor:
    if name.startswith("fc."):
        return uniform(rng, shape, POOLED_FEATURES)
    if len(shape) == 4:
        return kaiming_normal(rng, shape)
    return torch.full(shape, float(name.endswith("weight")))  # batch norm: scale 1, shift 0
