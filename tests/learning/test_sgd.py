"""Steps in turns, single gradients, held-out samples, noise: what algorithms with a loop of their own are made of."""

import numpy as np
import pytest
import torch

import numpy_network
import small_task
from pflmpi import tree
from pflmpi.learning import sgd
from pflmpi.learning.batch_order import batch_order, samples_of
from pflmpi.learning.client import Batch, model_loss, uniform
from pflmpi.learning.sgd import Phase
from pflmpi.learning.training import Pass, TrainingConfig
from pflmpi.models import MODELS


def test_a_turn_sees_what_the_turn_before_has_changed():
    task = small_task.task(momentum=0.5)
    model, loss, batches = task.init(), model_loss(task), [small_task.batch(0), small_task.batch(1)]
    found = sgd.alternate(task, model, batches, [Phase(loss, ("body",), 0.2), Phase(loss, ("head",), 0.1)])

    w = small_task.to_numpy(model)
    velocity = {name: np.zeros_like(value) for name, value in w.items()}
    for one in batches:
        for names, lr in ((("W1", "b1"), 0.2), (("W2", "b2"), 0.1)):
            slopes = numpy_network.gradients(w, *small_task.flat(one))
            for name in names:
                velocity[name] = 0.5 * velocity[name] + slopes[name]
                w[name] = w[name] - lr * velocity[name]
    small_task.assert_close(found, w)


def test_a_plain_turn_has_neither_momentum_nor_decay_and_keeps_its_limits():
    task = small_task.task(momentum=0.9, weight_decay=0.5)
    params = {"beta": {"value": torch.tensor(0.5)}}

    def loss(params, batch):
        return -3.0 * params["beta"]["value"]

    for steps, expected in ((1, 0.53), (2, 0.56), (100, 1.0)):
        turn = Phase(loss, ("beta",), 0.01, plain=True, limits=(0.0, 1.0))
        found = sgd.alternate(task, params, [small_task.batch(0)] * steps, [turn])
        assert float(found["beta"]["value"]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", ["resnet18", "cnn"])
def test_resnet18_trains_with_channels_last_and_returns_contiguous_weights(name, monkeypatch):
    architecture = MODELS[name]().bind((3, 32, 32), 3)
    task = small_task.task().replace(architecture=architecture)
    one = Batch(torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3)
    plain, seen, model = model_loss(task), [], task.init()

    def loss(params, batch):
        found = [leaf for _, leaf in tree.leaves(params) if leaf.dim() == 4 and leaf.shape[2] > 1 and leaf.shape[1] > 1]
        seen.append({leaf.is_contiguous(memory_format=torch.channels_last) for leaf in found})
        return plain(params, batch)

    trained = sgd.train(task, model, [one], loss, 0.02)
    assert seen == [{name == "resnet18"}]
    assert all(leaf.is_contiguous() for weights in (model, trained) for _, leaf in tree.leaves(weights))
    monkeypatch.setattr(type(architecture), "trains_channels_last", False)
    expected = dict(tree.leaves(sgd.train(task, model, [one], plain, 0.02)))
    for path, leaf in tree.leaves(trained):
        torch.testing.assert_close(leaf, expected[path], rtol=0, atol=1e-5)  # sums in another order


def test_gradient_is_that_of_the_parts_asked_for_and_changes_nothing():
    task = small_task.task()
    model, one = task.init(), small_task.batch(2)
    before = tree.clone(model)
    found = sgd.gradient(task, model, model_loss(task), one, ("head",))
    expected = numpy_network.gradients(small_task.to_numpy(model), *small_task.flat(one))
    assert list(found) == ["head"]
    np.testing.assert_allclose(found["head"]["weight"], expected["W2"], atol=1e-6)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(tree.leaves(model), tree.leaves(before), strict=True))
    moved = sgd.step(model, found, 0.1)
    assert moved["body"] is model["body"]
    after = small_task.to_numpy(model)["W2"] - 0.1 * expected["W2"]
    np.testing.assert_allclose(moved["head"]["weight"], after, atol=1e-6)


def test_held_out_samples_are_the_same_in_every_pass_and_apart_from_the_rest():
    samples = np.arange(100, 137)
    sides = [
        samples_of(samples, Pass(held_out=0.2, side=side), np.random.default_rng(5)) for side in ("rest", "held_out")
    ]
    assert len(sides[1]) == 7 and sorted(np.concatenate(sides)) == samples.tolist()
    assert samples_of(samples, Pass(), np.random.default_rng(5)) is samples
    two = [
        samples_of(samples[:2], Pass(held_out=0.01, side=side), np.random.default_rng(0))
        for side in ("rest", "held_out")
    ]
    assert sorted(np.concatenate(two)) == [100, 101]
    assert samples_of(samples[:1], Pass(held_out=0.5, side="held_out"), np.random.default_rng(0)).tolist() == [100]


def test_the_length_of_a_pass_is_its_steps_or_its_epochs_or_the_configured_one():
    training = TrainingConfig(batch_size=4, epochs=2)

    def length(one):
        return len(batch_order(np.random.default_rng(0), 10, training, one))

    assert [length(Pass()), length(Pass(epochs=1)), length(Pass(steps=7)), length(Pass(epochs=0))] == [6, 3, 7, 0]


def test_noise_is_uniform_and_does_not_depend_on_padding():
    key = torch.tensor(-1234567890123456789)
    found = uniform(key, (1000, 50))
    assert torch.equal(uniform(key, (1200, 50))[:1000], found)
    assert found.min() > 0 and found.max() < 1
    # Standard errors for 50,000 independent numbers: 0.0013 of the mean, 0.0045 of a correlation.
    assert abs(float(found.mean()) - 0.5) < 0.006 and abs(float(found.var()) - 1 / 12) < 0.002
    values = found.flatten()
    assert abs(float(torch.corrcoef(torch.stack([values[1:], values[:-1]]))[0, 1])) < 0.02
    assert not torch.equal(uniform(key + 1, (1000, 50)), found)


def test_noise_is_that_of_splitmix64():
    """Against Python's whole numbers, which have no width."""
    mask = (1 << 64) - 1
    for key in (0, 7, -5):
        found = uniform(torch.tensor(key), (3,)).tolist()
        for place in (1, 2, 3):
            z = (key + place * 0x9E3779B97F4A7C15) & mask
            z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
            z ^= z >> 31
            assert found[place - 1] == ((z >> 41) + 0.5) / 2**23


@pytest.mark.parametrize("kind", [{}, {"momentum": 0.5}, {"weight_decay": 0.1}, {"momentum": 0.5, "weight_decay": 0.1}])
def test_lanes_step_as_pytorch_does(kind):
    weights = torch.arange(6.0).view(3, 2)  # of three lanes
    task = small_task.task(**kind)
    padded = small_task.padded(torch.zeros(1, *small_task.SHAPE), torch.zeros(1, dtype=torch.int64), torch.ones(1))

    def trained(weight):
        def loss(params, batch):
            return (params["part"]["weight"] * torch.tensor([1.0, 2.0])).sum()

        params = {"part": {"weight": weight}}
        return tree.at(sgd.train(task.replace(batched=True), params, [padded] * 3, loss, 0.1), "part/weight")

    expected = weights.clone().requires_grad_(True)
    optimizer = torch.optim.SGD([expected], 0.1, **kind)
    for _ in range(3):
        optimizer.zero_grad()
        (expected * torch.tensor([1.0, 2.0])).sum().backward()
        optimizer.step()
    torch.testing.assert_close(torch.func.vmap(trained)(weights), expected.detach(), rtol=0, atol=1e-6)
