"""Models by name: each is a body that turns images into features and a linear head, one file each."""

from pflmpi.class_checks import subclass
from pflmpi.models.base import Architecture, Model
from pflmpi.models.cnn import CNN
from pflmpi.models.mlp import DNN, MLP
from pflmpi.models.protocnn import ProtoCNN
from pflmpi.models.resnet18 import ResNet18
from pflmpi.registry import Registry

__all__ = ["MODELS", "Architecture", "Model"]

MODELS: Registry[type[Model]] = Registry(
    "model",
    {model.name: model for model in (MLP, DNN, CNN, ProtoCNN, ResNet18)},
    group="pflmpi.models",
    accept=subclass(Model, "name", "summary"),
)
