"""Every model: sizes, agreement with PyTorch's own layers, initial weights, lanes, and what is refused."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torchvision
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.nn import functional as F

from pflmpi import tree
from pflmpi.errors import ConfigError
from pflmpi.models import MODELS
from pflmpi.models.base import Architecture
from pflmpi.models.cnn import CNN
from pflmpi.models.dnn import DNN
from pflmpi.models.mlp import MLP
from pflmpi.models.protocnn import ProtoCNN
from pflmpi.models.resnet18 import ResNet18
from pflmpi.models.two_conv import channels_last
from pflmpi.rng import stream
from pflmpi.tree import Tree

DIGITS, MNIST, CIFAR = (1, 8, 8), (1, 28, 28), (3, 32, 32)
SMALL_KERNEL = {"kernel": 3, "padding": 1}
WITHOUT_BATCH_NORM = [
    MLP().bind(DIGITS, 10),
    DNN(hidden=30).bind(CIFAR, 5),
    CNN(first_channels=4, second_channels=6, hidden=20).bind(CIFAR, 10),
    CNN(first_channels=4, second_channels=6, hidden=20, **SMALL_KERNEL).bind(DIGITS, 10),
    ProtoCNN().bind(MNIST, 10),
]


def named(architecture: Architecture) -> str:
    return f"{architecture.name}-{'x'.join(map(str, architecture.shape))}"


def start(architecture: Architecture, seed: int = 0) -> Tree:
    return architecture.init(stream(seed, 0, -1, "init"))


def images(architecture: Architecture, count: int, seed: int = 1) -> Tensor:
    return torch.from_numpy(stream(seed, 0, -1, "x").standard_normal((count, *architecture.shape), dtype=np.float32))


def labels(architecture: Architecture, count: int) -> Tensor:
    return torch.arange(count) % architecture.num_classes


def scores(architecture: Architecture, params: Tree, x: Tensor, training: bool = True) -> Tensor:
    return architecture.logits(params["head"], architecture.features(params, x, training))


def sequential(architecture: Architecture, params: Tree) -> nn.Sequential:
    """The same network in PyTorch's modules, ReLU before pooling, with the same weights."""
    flat = dict(tree.leaves(params))
    modules: list[nn.Module] = []
    for path in ("body/conv1", "body/conv2", "body/fc1", "head"):
        if f"{path}/weight" not in flat:
            continue
        weight, bias = flat[f"{path}/weight"], flat[f"{path}/bias"]
        if "conv" in path:
            kernel, padding = architecture.kernel, architecture.padding
            layer: nn.Module = nn.Conv2d(weight.shape[1], weight.shape[0], kernel, padding=padding)
            modules += [layer, nn.ReLU(), nn.MaxPool2d(2)]
        else:
            layer = nn.Linear(weight.shape[1], weight.shape[0])
            modules += [nn.Flatten(), layer] if path == "body/fc1" else [nn.ReLU(), layer]
        layer.weight.data, layer.bias.data = weight.clone(), bias.clone()
    return nn.Sequential(*modules)


def count(params: Tree, *parts: str) -> int:
    return sum(leaf.numel() for part in parts for _, leaf in tree.leaves(params[part]))


# --- sizes


@pytest.mark.parametrize(
    ("model", "shape", "classes", "parameters"),
    [
        (CNN(), CIFAR, 10, 878_538),
        (CNN(), MNIST, 10, 582_026),
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


# --- agreement with PyTorch's layers


@pytest.mark.parametrize("architecture", WITHOUT_BATCH_NORM, ids=named)
def test_scores_and_gradients_are_those_of_pytorch_modules(architecture):
    params = start(architecture)
    oracle = sequential(architecture, params)
    leaves = [leaf.requires_grad_() for _, leaf in tree.leaves(params)]
    x, y = images(architecture, 6), labels(architecture, 6)
    got, wanted = scores(architecture, params, x), oracle(x)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    gradients = torch.autograd.grad(F.cross_entropy(got, y), leaves)
    # Leaves are walked in sorted order, bias before weight; the module's are weight before bias.
    expected = torch.autograd.grad(F.cross_entropy(wanted, y), list(oracle.parameters()))
    for i, gradient in enumerate(gradients):
        torch.testing.assert_close(gradient, expected[i ^ 1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_pooling_before_the_relu_gives_the_same_bits(precision):
    x = channels_last(images(CNN().bind(CIFAR, 10), 5)).to(precision).requires_grad_()
    with torch.no_grad():
        x[:2] -= 5  # windows without a positive value
    after, before = F.relu(F.max_pool2d(x, 2)), F.max_pool2d(F.relu(x), 2)
    assert torch.equal(after, before)
    weight = torch.randn(after.shape, generator=torch.Generator().manual_seed(0)).to(precision)
    assert torch.equal(*(torch.autograd.grad((out * weight).sum(), x)[0] for out in (after, before)))


@pytest.mark.parametrize("shape", [(4, 1, 5, 6), (4, 3, 5, 6), (1, 1, 5, 6), (1, 3, 5, 6)])
def test_channels_last_changes_strides_and_no_value(shape):
    x = torch.arange(float(np.prod(shape))).reshape(shape)
    moved = channels_last(x)
    assert torch.equal(moved, x)
    assert moved.stride()[1:] == (1, shape[1] * shape[3], shape[1])
    assert torch.equal(torch.func.vmap(channels_last)(x.expand(2, *shape)), x.expand(2, *shape))


@pytest.mark.parametrize("architecture", [*WITHOUT_BATCH_NORM, ResNet18().bind(DIGITS, 10)], ids=named)
def test_features_are_pure_and_repeat_bit_by_bit(architecture):
    params, x = start(architecture), images(architecture, 5)
    kept_params, kept_x = tree.clone(params), x.clone()
    first = architecture.features(params, x, training=False)
    assert torch.equal(first, architecture.features(tree.clone(params), x.clone(), training=False))
    assert torch.equal(first, architecture.features(params, x.contiguous(memory_format=torch.channels_last), False))
    assert torch.equal(x, kept_x)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(tree.leaves(params), tree.leaves(kept_params), strict=True))


@pytest.mark.parametrize("architecture", WITHOUT_BATCH_NORM, ids=named)
def test_a_vmapped_gradient_is_the_gradient_of_each(architecture):
    models = [start(architecture, seed) for seed in range(3)]
    x = torch.stack([images(architecture, 4, seed) for seed in range(3)])
    y = labels(architecture, 4)

    def loss(params: Tree, x: Tensor) -> Tensor:
        return -F.log_softmax(scores(architecture, params, x), -1)[torch.arange(4), y].mean()

    together = torch.func.vmap(torch.func.grad(loss))(tree.stack(models), x)
    for i, model in enumerate(models):
        alone = torch.func.grad(loss)(model, x[i])
        for (path, got), (_, wanted) in zip(tree.leaves(tree.row(together, i)), tree.leaves(alone), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5, msg=lambda text, path=path: f"{path}: {text}")


@pytest.mark.parametrize("architecture", [*WITHOUT_BATCH_NORM, ResNet18().bind(DIGITS, 10)], ids=named)
def test_bfloat16_under_autocast_stays_near_float32_and_has_float32_gradients(architecture):
    params, x = start(architecture), images(architecture, 4)
    weight = params["head"]["weight"].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        low = scores(architecture, params, x, training=False)
    assert low.dtype == torch.bfloat16
    full = scores(architecture, params, x, training=False)
    assert (low.float() - full).abs().max() < 0.05 * full.abs().max()
    assert torch.autograd.grad(low.float().sum(), weight)[0].dtype == torch.float32


# --- batch norm


def reference(architecture: Architecture, params: Tree, build: Callable[[], nn.Module]) -> nn.Module:
    """torchvision's module with the weights of a tree."""
    module = build()
    state = {path.replace("/", "."): leaf for part in ("body", "stats") for path, leaf in tree.leaves(params[part])}
    state |= {f"fc.{key}": value for key, value in params["head"].items()}
    missing = module.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    assert all(key.endswith("num_batches_tracked") for key in missing.missing_keys)
    return module


def with_small_stem() -> nn.Module:
    module = torchvision.models.resnet18(num_classes=10)
    module.conv1, module.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    return module


@pytest.mark.parametrize(
    ("model", "build"),
    [
        (ResNet18(), with_small_stem),
        (ResNet18(stem="imagenet"), lambda: torchvision.models.resnet18(num_classes=10)),
    ],
    ids=["small", "imagenet"],
)
def test_resnet_is_torchvisions_in_both_modes_and_moves_the_same_statistics(model, build):
    architecture = model.bind((3, 24, 24), 10)
    params = start(architecture)
    module = reference(architecture, params, build)
    x = images(architecture, 4)
    fresh = tree.clone(params["stats"])
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(scores(architecture, params, x, training=True), module.train()(x))
        after_training = tree.clone(params["stats"])
        assert torch.equal(scores(architecture, params, x, training=False), module.eval()(x))
    buffers = dict(module.named_buffers())
    for path, value in tree.leaves(params["stats"]):
        assert torch.equal(value, buffers[path.replace("/", ".")]), path
    assert dict(tree.leaves(params["stats"])).keys() == dict(tree.leaves(fresh)).keys()
    assert not torch.equal(params["stats"]["bn1"]["running_mean"], fresh["bn1"]["running_mean"])
    for (_, kept), (_, now) in zip(tree.leaves(after_training), tree.leaves(params["stats"]), strict=True):
        assert torch.equal(kept, now)  # evaluation moves nothing


def test_resnet_strides_keep_the_features_and_shrink_the_images():
    plain, strided = ResNet18().bind(CIFAR, 10), ResNet18(stem_stride=2, first_stage_stride=2).bind(CIFAR, 10)
    params = start(strided)
    assert strided.features(params, images(strided, 2), training=True).shape == (2, 512)
    extra = count(params, "body") - count(start(plain), "body")
    assert extra == 64 * 64 + 2 * 64  # the shortcut of the first block: 1x1 convolution, scale and shift
    body, stats = params["body"]["layer1"]["0"]["downsample"], params["stats"]["layer1"]["0"]["downsample"]
    assert (sorted(body), sorted(stats)) == (["0", "1"], ["1"])


def test_resnet_gradients_reach_every_trained_leaf():
    architecture = ResNet18().bind(DIGITS, 10)
    params = start(architecture)
    leaves = [leaf.requires_grad_() for part in ("body", "head") for _, leaf in tree.leaves(params[part])]
    loss = F.cross_entropy(scores(architecture, params, images(architecture, 4)), labels(architecture, 4))
    assert all(gradient.abs().sum() > 0 for gradient in torch.autograd.grad(loss, leaves))
    assert not any(leaf.requires_grad for _, leaf in tree.leaves(params["stats"]))


def test_resnet_refuses_one_image_where_batch_norm_would_see_one_value():
    architecture = ResNet18().bind(DIGITS, 10)
    params, x = start(architecture), images(architecture, 1)
    with pytest.raises(ConfigError, match=r"batch of one image of 8x8.*training\.drop_last"):
        architecture.features(params, x, training=True)
    assert architecture.features(params, x, training=False).shape == (1, 512)
    larger = ResNet18().bind((1, 9, 9), 10)
    assert larger.features(start(larger), images(larger, 1), training=True).shape == (1, 512)


# --- initial weights


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


def test_initial_laws_are_those_of_pytorchs_layers():
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
            assert flat[name].std() == pytest.approx(value.std().item(), rel=0.03), name
            assert abs(flat[name].mean()) < 5 * flat[name].std() / np.sqrt(value.numel()), name
        else:
            assert torch.equal(flat[name], value), name


# --- what is refused


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        (
            CNN(),
            DIGITS,
            r"cnn cannot use images of 8x8.*kernel = 5.*8 to 2 and then to nothing.*16x16.*kernel = 3 with",
        ),
        (CNN(), (3, 40, 15), r"images of 40x15.*15 to 5 and then to nothing.*smallest image is 16x16"),
        (ProtoCNN(), (1, 3, 3), r"protocnn cannot use images of 3x3.*3 to nothing.*choose model mlp"),
        (CNN(kernel=3, padding=3), CIFAR, r"model\.padding = 3 is not smaller than model\.kernel = 3.*at most 2"),
    ],
)
def test_images_that_leave_nothing_are_refused(model, shape, message):
    with pytest.raises(ConfigError, match=message):
        model.bind(shape, 10)


def test_the_smallest_image_named_in_the_refusal_is_enough_and_one_less_is_not():
    assert CNN().bind((1, 16, 16), 10).pooled == (1, 1)
    with pytest.raises(ConfigError):
        CNN().bind((1, 16, 15), 10)
    assert CNN(**SMALL_KERNEL).bind((1, 4, 4), 10).pooled == (1, 1)
    with pytest.raises(ConfigError):
        CNN(**SMALL_KERNEL).bind((1, 4, 3), 10)


@pytest.mark.parametrize("name", MODELS)
def test_fields_are_checked_and_nothing_else_is_taken(name):
    adapter = TypeAdapter(MODELS[name])
    assert adapter.validate_python({}) == MODELS[name]()
    with pytest.raises(ValidationError, match="colour"):
        adapter.validate_python({"colour": 1})
    for field in dataclasses.fields(MODELS[name]):
        with pytest.raises(ValidationError, match=field.name):
            adapter.validate_python({field.name: -1})
        assert adapter.json_schema()["properties"][field.name]["description"]
