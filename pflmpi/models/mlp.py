"""Perceptrons with one hidden layer, `mlp` and pFedCFR's `dnn`, and logistic regression."""

from dataclasses import dataclass
from math import prod
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from pflmpi.models.base import Architecture, Model, Shape
from pflmpi.models.layers import affine, linear
from pflmpi.tree import Tree, part


@dataclass(frozen=True, kw_only=True)
class Perceptron(Architecture):
    """C*H*W - d - K with a ReLU: the body is the first layer, the head the second."""

    @property
    def layers(self) -> tuple[str, ...]:
        return "body/fc1", "head"

    def init(self, rng: np.random.Generator) -> Tree:
        body: Tree = {"fc1": linear(rng, prod(self.shape), self.num_features)}
        return {"body": body, "head": linear(rng, self.num_features, self.num_classes)}

    def features(self, params: Tree, x: Tensor, training: bool) -> Tensor:
        return F.relu(affine(part(part(params, "body"), "fc1"), x.flatten(1)))


@dataclass(frozen=True, kw_only=True)
class MLP(Model):
    """One hidden layer with a ReLU, on images of any shape, flattened (FedFCD: 784-100-K)."""

    name: ClassVar[str] = "mlp"
    summary: ClassVar[str] = "perceptron with one hidden layer (FedFCD on Fashion-MNIST)"

    hidden: Annotated[int, Field(ge=1, le=65536, description="width of the hidden layer, d")] = 100

    def bind(self, shape: Shape, num_classes: int) -> Architecture:
        return Perceptron(name=self.name, shape=shape, num_classes=num_classes, num_features=self.hidden)


@dataclass(frozen=True, kw_only=True)
class DNN(MLP):
    """Two fully connected layers with a ReLU between: a feature layer (the body) and a decision layer (the head).

    The paper says "2-layer fully connected units" with one of the two fused as a feature layer (r = 1): one hidden
    layer, as `mlp` has. It gives no width; 100 is assumed. The name is separate so that a configuration says which
    paper it follows.
    """

    name: ClassVar[str] = "dnn"
    summary: ClassVar[str] = "two fully connected layers (pFedCFR on MNIST and Fashion-MNIST)"


@dataclass(frozen=True, kw_only=True)
class LinearClassifier(Architecture):
    """C*H*W - K: the body has no weights, the head is the whole model."""

    @property
    def layers(self) -> tuple[str, ...]:
        return ("head",)

    def init(self, rng: np.random.Generator) -> Tree:
        return {"body": {}, "head": linear(rng, self.num_features, self.num_classes)}

    def features(self, params: Tree, x: Tensor, training: bool) -> Tensor:
        return x.flatten(1)


@dataclass(frozen=True, kw_only=True)
class Logistic(Model):
    """Multinomial logistic regression on flattened images (784-K on MNIST), as in many speed comparisons."""

    name: ClassVar[str] = "logistic"
    summary: ClassVar[str] = "logistic regression on flattened images (speed comparisons)"

    def bind(self, shape: Shape, num_classes: int) -> Architecture:
        return LinearClassifier(name=self.name, shape=shape, num_classes=num_classes, num_features=prod(shape))
