"""Training a head on class means, against NumPy."""

import numpy as np
import pytest
import torch

import numpy_network
import small_task
from pflmpi.algorithms.server_head import train_head

LABELS = [0, 2, 0, 1, 2, 2, 0]


def head(seed):
    rng = np.random.default_rng(seed)
    weight, bias = rng.normal(size=(small_task.CLASSES, small_task.FEATURES)), rng.normal(size=small_task.CLASSES)
    return {"weight": torch.from_numpy(weight).float(), "bias": torch.from_numpy(bias).float()}


def upload(seed, labels):
    means = np.random.default_rng(seed).normal(size=(len(labels), small_task.FEATURES))
    return {"labels": torch.tensor(labels, dtype=torch.int32), "means": torch.from_numpy(means).float()}


@pytest.mark.parametrize("batch_size, epochs", [(1, 1), (3, 2), (100, 1), (100, 3)])
def test_a_head_takes_a_step_of_the_mean_cross_entropy_on_every_minibatch(batch_size, epochs):
    start, up = head(1), upload(2, LABELS)
    found = train_head(start, up, np.random.default_rng(5), lr=0.7, epochs=epochs, batch_size=batch_size)
    weight, bias = (start[name].double().numpy() for name in ("weight", "bias"))
    means, labels, rng = up["means"].double().numpy(), np.array(LABELS), np.random.default_rng(5)
    for _ in range(epochs):
        order = rng.permutation(len(LABELS))
        for first in range(0, len(order), batch_size):
            chosen = order[first : first + batch_size]
            error = numpy_network.softmax(means[chosen] @ weight.T + bias)
            error[np.arange(len(chosen)), labels[chosen]] -= 1
            weight, bias = weight - 0.7 * error.T @ means[chosen] / len(chosen), bias - 0.7 * error.mean(0)
    np.testing.assert_allclose(found["weight"], weight, rtol=0, atol=1e-6)
    np.testing.assert_allclose(found["bias"], bias, rtol=0, atol=1e-6)


def test_a_step_is_the_one_that_the_losss_own_gradient_gives():
    start, up = head(1), upload(2, LABELS)
    weight, bias = (start[name].clone().requires_grad_(True) for name in ("weight", "bias"))
    loss = torch.nn.functional.cross_entropy(up["means"] @ weight.mT + bias, up["labels"].long())
    slopes = torch.autograd.grad(loss, (weight, bias))
    found = train_head(start, up, np.random.default_rng(0), lr=0.5, epochs=1, batch_size=len(LABELS))
    for name, leaf, slope in zip(("weight", "bias"), (weight, bias), slopes, strict=True):
        torch.testing.assert_close(found[name], (leaf - 0.5 * slope).detach(), rtol=0, atol=1e-6)


def test_the_given_head_stays_as_it_is():
    start, up = head(1), upload(2, LABELS)
    found = train_head(start, up, np.random.default_rng(0), lr=0.5, epochs=1, batch_size=1)
    assert not torch.equal(found["weight"], start["weight"])
    assert torch.equal(start["weight"], head(1)["weight"]) and torch.equal(start["bias"], head(1)["bias"])


def test_without_uploads_a_head_stays_as_it_is():
    found = train_head(head(1), upload(2, []), np.random.default_rng(0), lr=0.5, epochs=1, batch_size=4)
    assert torch.equal(found["weight"], head(1)["weight"]) and torch.equal(found["bias"], head(1)["bias"])
