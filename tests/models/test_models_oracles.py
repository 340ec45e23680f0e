"""Every model computes what PyTorch's own modules compute: alone, in lanes, in bfloat16, with batch norm."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from model_helpers import CIFAR, DIGITS, WITHOUT_BATCH_NORM, count, images, labels, named, scores, start
from pflmpi import tree
from pflmpi.errors import ConfigError
from pflmpi.models.base import Architecture
from pflmpi.models.conv_net import CNN, channels_last
from pflmpi.models.resnet18 import ResNet18
from pflmpi.tree import Tree


def sequential(architecture: Architecture, params: Tree) -> nn.Sequential:
    """The same network in PyTorch's modules, ReLU before pooling, with the same weights."""
    flat = dict(tree.leaves(params))
    modules: list[nn.Module] = []
    for path in ("body/conv1", "body/conv2", "body/conv3", "body/fc1", "head"):
        if f"{path}/weight" not in flat:
            continue
        weight, bias = flat[f"{path}/weight"], flat[f"{path}/bias"]
        if "conv" in path:
            kernel, padding = architecture.kernel, architecture.padding[0]
            layer: nn.Module = nn.Conv2d(weight.shape[1], weight.shape[0], kernel, padding=padding)
            modules += [layer, nn.ReLU(), nn.MaxPool2d(2)]
        else:
            layer = nn.Linear(weight.shape[1], weight.shape[0])
            before = nn.ReLU() if path == "head" and "body/fc1/weight" in flat else nn.Flatten()
            modules += [before, layer]
        layer.weight.data, layer.bias.data = weight.clone(), bias.clone()
    return nn.Sequential(*modules)


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


def with_the_strides_of_fedproto() -> nn.Module:
    module = torchvision.models.resnet18(num_classes=10)
    module.conv1.stride, module.maxpool.stride = (1, 1), 4
    return module


@pytest.mark.parametrize(
    ("model", "build"),
    [
        (ResNet18(), with_small_stem),
        (ResNet18(stem="imagenet"), lambda: torchvision.models.resnet18(num_classes=10)),
        (ResNet18(stem="imagenet", stem_stride=1, pool_stride=4), with_the_strides_of_fedproto),
    ],
    ids=["small", "imagenet", "strides"],
)
def test_resnet_is_torchvisions_in_both_modes_and_moves_the_same_statistics(model, build):
    architecture = model.bind((3, 24, 24), 10)
    params = start(architecture)
    module = reference(architecture, params, build)
    x = images(architecture, 4)
    last = x.to(memory_format=torch.channels_last)  # as ours has them, for the same bits
    fresh = tree.clone(params["stats"])
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(scores(architecture, params, x, training=True), module.train()(last))
        after_training = tree.clone(params["stats"])
        assert torch.equal(scores(architecture, params, x, training=False), module.eval()(last))
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


def test_a_stride_of_a_max_pool_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"model.pool_stride = 4, but the stem small .* set model.stem: imagenet"):
        ResNet18(pool_stride=4).bind(CIFAR, 10)


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
