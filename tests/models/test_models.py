"""Every model: sizes, initial weights, and what is refused."""

import dataclasses

import numpy as np
import pytest
import torch
import torchvision
from pydantic import TypeAdapter, ValidationError
from torch import nn

from model_helpers import CIFAR, DIGITS, MNIST, SMALL_KERNEL, WITHOUT_BATCH_NORM, count, images, named, start
from pflmpi import tree
from pflmpi.errors import ConfigError
from pflmpi.models import MODELS
from pflmpi.models.conv_net import CNN, ProtoCNN
from pflmpi.models.mlp import DNN, MLP
from pflmpi.models.resnet18 import ResNet18


@pytest.mark.parametrize(
    ("model", "shape", "classes", "parameters"),
    [
        (CNN(), CIFAR, 10, 878_538),
        (CNN(), MNIST, 10, 582_026),
        (CNN(third_channels=128, **SMALL_KERNEL), CIFAR, 100, 896 + 18_496 + 73_856 + 2048 * 512 + 512 + 51_300),
        (MLP(), MNIST, 10, 784 * 100 + 100 + 100 * 10 + 10),
        (DNN(), MNIST, 10, 79_510),
        (ProtoCNN(), MNIST, 10, (250 + 10) + (5000 + 20) + (320 * 50 + 50) + 510),
        (ResNet18(), CIFAR, 10, 11_173_962),
        (ResNet18(stem="imagenet"), (3, 64, 64), 1000, 11_689_512),
    ],
)
def test_the_number_of_parameters_is_the_published_one(model, shape, classes, parameters):
    assert count(start(model.bind(shape, classes)), "body", "head") == parameters


def test_cnn_has_the_bytes_that_fedgmh_counts():
    params = start(CNN().bind(CIFAR, 10))
    assert count(params, "head") == 5130
    assert f"{tree.num_bytes(params['body']) / 1024:.2f}" == "3411.75"
    assert f"{tree.num_bytes(params) / 1024:.2f}" == "3431.79"


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("mlp", "dnn", "logistic")])
@pytest.mark.parametrize("shape", [(10,), (5, 7)])
def test_models_for_images_refuse_other_samples(name, shape):
    with pytest.raises(ConfigError, match=f"model {name} takes images, CxHxW; the samples are {shape[0]}"):
        MODELS[name]().bind(shape, 3)


@pytest.mark.parametrize("shape", [DIGITS, MNIST, CIFAR])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_turns_images_into_features_and_scores(name, shape):
    fields = SMALL_KERNEL if shape == DIGITS and name in ("cnn", "protocnn") else {}
    architecture = MODELS[name](**fields).bind(shape, 7)
    params = start(architecture)
    z = architecture.features(params, images(architecture, 3), training=False)
    assert z.shape == (3, architecture.num_features)
    assert z.dtype == torch.float32
    assert architecture.logits(params["head"], z).shape == (3, 7)
    assert params["head"]["weight"].shape == (7, architecture.num_features)
    assert params["head"]["bias"].shape == (7,)
    assert all(leaf.dtype == torch.float32 for _, leaf in tree.leaves(params))
    assert sorted(params) == (["body", "head", "stats"] if architecture.has_batch_norm else ["body", "head"])


def test_widths_of_protocnn_share_the_features():
    bound = [ProtoCNN(channels=channels).bind(MNIST, 10) for channels in (18, 20, 22)]
    assert [architecture.num_features for architecture in bound] == [50, 50, 50]
    assert [start(a)["body"]["conv2"]["weight"].shape[0] for a in bound] == [18, 20, 22]
    assert len(set(bound)) == 3


def test_architectures_are_equal_when_models_and_images_are():
    for name, model in MODELS.items():
        assert model().bind(MNIST, 10) == model().bind(MNIST, 10), name
        assert hash(model().bind(MNIST, 10)) == hash(model().bind(MNIST, 10))
        assert model().bind(MNIST, 10) != model().bind(MNIST, 9)
        assert model().bind(MNIST, 10) != model().bind(CIFAR, 10)
    assert MLP().bind(MNIST, 10) != DNN().bind(MNIST, 10)
    assert ResNet18().bind(CIFAR, 10) != ResNet18(first_stage_stride=2).bind(CIFAR, 10)


def test_every_model_is_registered_under_its_name_with_a_summary():
    for name, model in MODELS.items():
        assert model.name == name
        assert len(model.summary) > 10 and "\n" not in model.summary


@pytest.mark.parametrize("name", MODELS)
def test_initial_weights_come_from_the_generator_alone(name):
    architecture = MODELS[name]().bind(CIFAR, 10)
    state = torch.random.get_rng_state()
    first, again, other = start(architecture), start(architecture), start(architecture, seed=1)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(tree.leaves(first), tree.leaves(again), strict=True))
    assert not torch.equal(first["head"]["weight"], other["head"]["weight"])
    assert not torch.equal(first["head"]["bias"], other["head"]["bias"])


@pytest.mark.parametrize("architecture", WITHOUT_BATCH_NORM, ids=named)
def test_initial_weights_are_uniform_within_pytorchs_bound(architecture):
    flat = dict(tree.leaves(start(architecture)))
    for path, leaf in flat.items():
        weight = flat[path.replace("bias", "weight")]
        bound = 1 / np.sqrt(weight[0].numel())
        assert leaf.abs().max() <= bound * (1 + 1e-6), path
        if leaf.numel() >= 1000:  # 5 standard errors of the mean, and of the second moment bound^2 / 3
            assert abs(leaf.mean()) < 5 * bound / np.sqrt(3 * leaf.numel()), path
            spread = bound**2 * np.sqrt(4 / 45 / leaf.numel())
            assert abs(leaf.square().mean() - bound**2 / 3) < 5 * spread, path


def test_initial_distributions_are_those_of_pytorchs_layers():
    torch.manual_seed(0)
    layer, module = nn.Conv2d(32, 64, 5), torchvision.models.resnet18()
    ours = start(CNN().bind(CIFAR, 10))["body"]["conv2"]
    for key in ("weight", "bias"):
        assert ours[key].abs().max() == pytest.approx(getattr(layer, key).abs().max().item(), rel=0.05)
    params = start(ResNet18().bind(CIFAR, 10))
    flat = {path.replace("/", "."): leaf for part in ("body", "stats") for path, leaf in tree.leaves(params[part])}
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if name == "conv1.weight" or name.startswith("fc.") or name.endswith("num_batches_tracked"):
            continue
        if value.dim() == 4:
            assert flat[name].std() == pytest.approx(value.std().item(), rel=5 / np.sqrt(value.numel())), name
            assert abs(flat[name].mean()) < 5 * flat[name].std() / np.sqrt(value.numel()), name
        else:
            assert torch.equal(flat[name], value), name


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        (CNN(), DIGITS, r"cnn cannot use images of 8x8: nothing is left.*model mlp.*kernel = 3 and .*padding = 1"),
        (CNN(), (3, 40, 15), "images of 40x15: nothing is left"),
        (CNN(third_channels=8, hidden=None), CIFAR, "images of 32x32: nothing is left"),
        (CNN(), (9,), "model cnn takes images"),
        (ProtoCNN(), (1, 3, 3), "protocnn cannot use images of 3x3: nothing is left"),
        (CNN(kernel=3, padding=3), CIFAR, r"model\.padding = 3 is not smaller than model\.kernel = 3.*at most 2"),
    ],
)
def test_images_too_small_for_the_layers_are_refused(model, shape, message):
    with pytest.raises(ConfigError, match=message):
        model.bind(shape, 10)


def test_the_smallest_images_are_enough_and_one_less_is_not():
    assert CNN().bind((1, 16, 16), 10).pooled == (1, 1)
    with pytest.raises(ConfigError):
        CNN().bind((1, 16, 15), 10)
    assert CNN(**SMALL_KERNEL).bind((1, 4, 4), 10).pooled == (1, 1)
    with pytest.raises(ConfigError):
        CNN(**SMALL_KERNEL).bind((1, 4, 3), 10)


@pytest.mark.parametrize("name", MODELS)
def test_fields_are_checked_and_others_refused(name):
    adapter = TypeAdapter(MODELS[name])
    assert adapter.validate_python({}) == MODELS[name]()
    with pytest.raises(ValidationError, match="colour"):
        adapter.validate_python({"colour": 1})
    for field in dataclasses.fields(MODELS[name]):
        with pytest.raises(ValidationError, match=field.name):
            adapter.validate_python({field.name: -1})
        assert adapter.json_schema()["properties"][field.name]["description"]
