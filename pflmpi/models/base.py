"""The contract of a model: configuration fields, bound to images and classes, give a body and a head on trees."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import AfterValidator, ConfigDict, Field
from torch import Tensor

from pflmpi.errors import ConfigError
from pflmpi.models.layers import affine
from pflmpi.tree import Tree, leaf, part

Shape = tuple[int, ...]


def require_images(model: str, shape: Shape) -> None:
    """Raises `ConfigError` unless samples of this shape are images, (C, H, W)."""
    if len(shape) != 3:
        raise ConfigError(
            f"model {model} takes images, CxHxW; the samples are {'x'.join(map(str, shape))}; choose mlp or logistic, "
            "which take any shape, or a module of your own"
        )


@dataclass(frozen=True, kw_only=True)
class Architecture(ABC):
    """A model for samples of one shape and a number of classes; its methods are pure functions of trees.

    The weights are `{"body": {...}, "head": {"weight": [K, d], "bias": [K]}}`, float32, and with batch norm also
    `"stats": {...}`, its running means and variances. Two clients belong to one cohort if and only if their
    architectures are equal.

    Attributes:
        name: the model's name in a configuration.
        shape: of a sample: (C, H, W) of an image, (F,) of a line of a table.
        num_classes: K.
        num_features: d, the width of the body's output.
        has_batch_norm: whether training updates the part "stats" of the weights, which lanes refuse.
        draws_noise: whether training draws noise, as dropout does, from `noise_key`.
        has_convolution: whether one call for many clients uses grouped convolutions.
        suits_lanes: whether `executor: auto` may choose lanes; PyTorch takes recurrent layers apart and computes
            attention client by client there.
        trains_channels_last: whether weights of four axes have the second one innermost in memory while they are
            trained client by client, on a CPU, or on a GPU in tf32 or bf16: convolutions may be faster then, and
            nothing may take a `view` of them.
        linear_head: whether the scores are x W^T + b of the head's "weight" and "bias", which it consists of.
        replays_steps: whether a step of training may be recorded, and replayed with other batches.
    """

    has_batch_norm: ClassVar[bool] = False
    has_convolution: ClassVar[bool] = False
    suits_lanes: ClassVar[bool] = True
    trains_channels_last: ClassVar[bool] = False
    draws_noise: ClassVar[bool] = False
    linear_head: ClassVar[bool] = True
    replays_steps: ClassVar[bool] = True

    name: str
    shape: Shape
    num_classes: int
    num_features: int

    @property
    @abstractmethod
    def layers(self) -> tuple[str, ...]:
        """Paths of the modules that own parameters, in the order of their first calls; "head" is last.

        Most have a "weight" and a "bias". Batch norm counts as a module; its statistics are not parameters. A module
        with submodules owns only parameters of its own.
        """

    @property
    def frozen(self) -> tuple[str, ...]:
        """Paths of the parameters that are not trained where `model.trainable` says nothing."""
        return ()

    @property
    def constants(self) -> tuple[str, ...]:
        """Paths in "stats" of buffers that depend on the seed and never change; frozen if any parameter is."""
        return ()

    @abstractmethod
    def init(self, rng: np.random.Generator) -> Tree:
        """Initial weights on the host, from PyTorch's default distributions; all draws come from `rng`."""

    @abstractmethod
    def features(self, params: Tree, x: Tensor, training: bool) -> Tensor:
        """z = f(body; x), [B, d], for x: [B, C, H, W] float; the head in `params` is not needed.

        With `training`, batch norm uses the batch's own statistics, and the running statistics in `params["stats"]` are
        updated in place; nothing else is changed.
        """

    def noise_key(self, params: Tree) -> Tensor:
        """Returns the key of the noise in a training step; `ConfigError` if the algorithm passes none."""
        if "noise" not in params:
            raise ConfigError(
                f"model {self.name} draws noise (dropout) while it is trained, and the algorithm calls it in training "
                "with weights that are not those its loss is given; choose a model without dropout"
            )
        return leaf(part(params, "noise"), "key")

    def logits(self, head: Tree, z: Tensor) -> Tensor:
        """Returns the scores [B, K] of features z: [B, d]."""
        return affine(head, z)


_REFERENCE = r"^.+@[0-9]+$"


def run_reference(weights: object) -> tuple[str, int] | None:
    """Parses the run and the round that `model.weights` names; None if it names none.

    >>> run_reference("runs/alone@40"), run_reference("net.pt")
    (('runs/alone', 40), None)
    """
    if not isinstance(weights, str) or not re.fullmatch(_REFERENCE, weights):
        return None
    run, _, round = weights.rpartition("@")
    return run, int(round)


def _of_run(weights: str | None) -> str | None:
    if weights is not None and run_reference(weights) is None:
        raise ValueError(
            "must be RUN@ROUND, such as runs/mine@40; only a module (name: ./net.py:Net) takes a file of weights"
        )
    return weights


@dataclass(frozen=True, kw_only=True)
class Model(ABC):
    """The `model` section of a configuration: the fields of a subclass are its keys besides `name`.

    Attributes:
        name: in the configuration.
        summary: one line for `pflmpi list`.
    """

    __pydantic_config__: ClassVar[Any] = ConfigDict(extra="forbid")

    name: ClassVar[str]
    summary: ClassVar[str]

    weights: Annotated[
        str | None,
        AfterValidator(_of_run),
        Field(description="RUN@ROUND: begin with the models of a run after that round"),
    ] = None
    trainable: Annotated[
        list[str] | None,
        Field(description="patterns of the parameters that are trained, such as head.*; null: as the module says"),
    ] = None
    personal: Annotated[
        list[str] | None,
        Field(description="patterns of the trained parameters that stay with a client; null: as the algorithm says"),
    ] = None
    cache_features: Annotated[
        bool,
        Field(description="compute the features of a frozen body once for each sample, and train the head on them"),
    ] = False

    @classmethod
    def check_keys(cls, values: Mapping[str, Any]) -> None:
        """Raises `ConfigError` for ambiguous keys of the configuration's section."""
        return None

    @abstractmethod
    def bind(self, shape: Shape, num_classes: int) -> Architecture:
        """Returns the architecture for samples of a shape and K classes; `ConfigError` if the shape is unsuitable."""
