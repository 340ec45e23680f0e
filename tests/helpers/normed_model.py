"""A perceptron with batch norm: the smallest model with statistics."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import small_task
from pflmpi.learning.task import Task
from pflmpi.learning.training import TrainingConfig
from pflmpi.models.base import Architecture, Shape
from pflmpi.models.mlp import MLP, Perceptron
from pflmpi.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Normed(Perceptron):
    """The hidden layer is normalised, without scale and shift."""

    has_batch_norm: ClassVar[bool] = True

    def init(self, rng: np.random.Generator) -> Tree:
        d = self.num_features
        return {**super().init(rng), "stats": {"mean": torch.full((d,), 0.1), "var": torch.full((d,), 2.0)}}

    def features(self, params: Tree, x: Tensor, training: bool) -> Tensor:
        stats = params["stats"]
        z = super().features(params, x, training)
        return F.batch_norm(z, stats["mean"], stats["var"], training=training)  # type: ignore[arg-type, index]


@dataclass(frozen=True, kw_only=True)
class NormedMLP(MLP):
    """The same for a configuration."""

    def bind(self, shape: Shape, num_classes: int) -> Architecture:
        return Normed(name=self.name, shape=shape, num_classes=num_classes, num_features=self.hidden)


def task(**training: object) -> Task:
    architecture = Normed(
        name="normed", shape=small_task.SHAPE, num_classes=small_task.CLASSES, num_features=small_task.FEATURES
    )
    return Task(architecture, TrainingConfig(**training), 4, 0, (0.5,), (0.5,))  # type: ignore[arg-type]
