"""The layers of every model: in forward order, complete; and ResNet-18 with two fully connected layers."""

import math

import pytest
import torch
import torchvision
from torch import nn
from torch.overrides import TorchFunctionMode

from model_helpers import CIFAR, DIGITS, WITHOUT_BATCH_NORM, count, images, named, scores, start
from pflmpi import tree
from pflmpi.models.resnet18 import ResNet18

RESNETS = [
    ResNet18().bind(DIGITS, 10),
    ResNet18(stem="imagenet", first_stage_stride=2, hidden=20).bind((3, 24, 24), 10),
]


class Trace(TorchFunctionMode):
    """Notes which leaves the layers of a forward pass are called with."""

    def __init__(self, leaves: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.names, self.seen = {id(leaf): path for path, leaf in leaves.items()}, []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function.__name__ in ("linear", "conv2d", "batch_norm"):
            arguments = [*args, *(kwargs or {}).values()]
            self.seen += [self.names[id(argument)] for argument in arguments if id(argument) in self.names]
        return function(*args, **(kwargs or {}))


def parameters(params):
    return dict(tree.leaves({part: params[part] for part in ("body", "head")}))


def tensors(architecture, owned):
    """The parameters layer by layer, weight before bias."""
    names = [f"{layer}/{name}" for layer in architecture.layers for name in ("weight", "bias")]
    return [name for name in names if name in owned]


@pytest.mark.parametrize("architecture", [*WITHOUT_BATCH_NORM, *RESNETS], ids=named)
def test_layers_are_those_of_a_forward_pass_in_its_order(architecture):
    params = start(architecture)
    owned = parameters(params)
    with Trace(owned) as trace:
        scores(architecture, params, images(architecture, 2))
    assert tensors(architecture, owned) == trace.seen
    assert sorted(trace.seen) == sorted(owned)


def test_layers_of_resnet_are_in_the_order_in_which_torchvision_registers_and_calls_its_modules():
    module = torchvision.models.resnet18(num_classes=10)
    owners = {name: submodule for name, submodule in module.named_modules() if [*submodule.parameters(recurse=False)]}
    called = []
    for name, submodule in owners.items():
        submodule.register_forward_hook(lambda *_, name=name: called.append(name))
    with torch.no_grad():
        module.eval()(torch.zeros(1, 3, 32, 32))
    paths = ["head" if name == "fc" else "body/" + name.replace(".", "/") for name in owners]
    assert list(ResNet18(stem="imagenet").bind(CIFAR, 10).layers) == paths
    assert called == list(owners)


def test_resnet_with_a_hidden_layer_has_the_64_tensors_that_pfedcfr_counts():
    architecture = ResNet18(hidden=20).bind(DIGITS, 10)
    names = tensors(architecture, parameters(start(architecture)))
    assert len(names) == 64
    assert names[60:] == ["body/fc/0/weight", "body/fc/0/bias", "head/weight", "head/bias"]


def test_resnet_ends_in_the_hidden_layer_that_is_asked_for():
    plain, hidden = ResNet18().bind(DIGITS, 10), ResNet18(hidden=20).bind(DIGITS, 10)
    assert (plain.num_features, hidden.num_features) == (512, 20)
    params, x = start(hidden), images(hidden, 4)
    last = params["body"]["fc"]["0"]
    assert params["head"]["weight"].shape == (10, 20)
    assert count(params, "body") - count(start(plain), "body") == 512 * 20 + 20
    body = {key: value for key, value in params["body"].items() if key != "fc"}
    pooled = plain.features({**params, "body": body}, x, training=False)
    expected = torch.relu(pooled @ last["weight"].T + last["bias"])
    torch.testing.assert_close(hidden.features(params, x, training=False), expected)
    assert plain != hidden != ResNet18(hidden=512).bind(DIGITS, 10) != plain


def test_hidden_layer_of_resnet_starts_as_pytorchs_and_leaves_the_convolutions_as_they_were():
    plain, hidden = start(ResNet18().bind(DIGITS, 10)), start(ResNet18(hidden=200).bind(DIGITS, 10))
    bound = nn.Linear(512, 200).weight.abs().max().item()
    assert bound == pytest.approx(1 / math.sqrt(512), rel=0.01)
    for leaf in hidden["body"]["fc"]["0"].values():
        assert bound * 0.95 < leaf.abs().max() <= 1 / math.sqrt(512)
    assert torch.equal(plain["body"]["conv1"]["weight"], hidden["body"]["conv1"]["weight"])
    assert (hidden["body"]["bn1"]["weight"] == 1).all() and (hidden["body"]["bn1"]["bias"] == 0).all()
