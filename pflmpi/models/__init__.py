"""Models by name: each is a body that turns images into features and a linear head."""

import inspect

from torch import nn

from pflmpi.models.base import Architecture, Model
from pflmpi.models.conv_net import CNN, DropoutCNN, LeNet, ProtoCNN
from pflmpi.models.mlp import DNN, MLP, Logistic
from pflmpi.models.resnet18 import ResNet18
from pflmpi.models.torch_module import module_model
from pflmpi.registry import Registry, accept_subclass

__all__ = ["MODELS", "Architecture", "Model"]


def _accept(kind: object) -> type[Model]:
    """A model class; a class or function that makes a torch module becomes one."""
    if inspect.isfunction(kind) or (isinstance(kind, type) and issubclass(kind, nn.Module)):
        return module_model(kind)  # type: ignore[arg-type]
    return accept_subclass(Model, "name", "summary")(kind)  # type: ignore[no-any-return]


MODELS: Registry[type[Model]] = Registry(
    "model",
    {
        "cnn": CNN,
        "dnn": DNN,
        "dropout_cnn": DropoutCNN,
        "lenet": LeNet,
        "logistic": Logistic,
        "mlp": MLP,
        "protocnn": ProtoCNN,
        "resnet18": ResNet18,
    },
    group="pflmpi.models",
    accept=_accept,
)
