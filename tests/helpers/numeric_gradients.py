"""Gradients of a loss written in NumPy, by central differences: for losses whose gradients are long by hand."""

import numpy as np
import torch

from pflmpi import tree

Weights = dict[str, np.ndarray]  # float64 by path


def weights(params):
    """The leaves of a tree by path."""
    return {path: leaf.double().numpy().copy() for path, leaf in tree.leaves(params)}


def descend(loss, w, paths, lr):
    """The weights after a step of gradient descent on those of the given paths."""
    moved = {path: value.copy() for path, value in w.items()}
    for path in paths:
        entries = w[path]
        for place in np.ndindex(entries.shape):
            before, values = entries[place], []
            for step in (1e-6, -1e-6):
                entries[place] = before + step
                values.append(loss(w))
            entries[place] = before
            moved[path][place] -= lr * (values[0] - values[1]) / 2e-6
    return moved


def assert_near(actual, expected, prefix="", tolerance=2e-6):
    """The tolerance is that of float32 weights near one and of differences of a float64 loss."""
    for path, leaf in tree.leaves(actual):
        np.testing.assert_allclose(leaf.double().numpy(), expected[prefix + path], rtol=0, atol=tolerance, err_msg=path)


def features(w, x):
    """The features of the small model."""
    return np.maximum(x @ w["body/fc1/weight"].T + w["body/fc1/bias"], 0)


def logits(w, head, z):
    """The logits of the head of that name."""
    return z @ w[f"{head}/weight"].T + w[f"{head}/bias"]


def cross_entropy(scores, y):
    """The mean over samples."""
    shifted = scores - scores.max(-1, keepdims=True)
    return float(np.mean(np.log(np.exp(shifted).sum(-1)) - shifted[np.arange(len(y)), y]))


def layer_norm(w, name, x):
    """Over the last axis, with the weights of that name."""
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * w[f"{name}/weight"] + w[f"{name}/bias"]


def varied(params, seed):
    """The same tree with random entries, so that no weight is a special value such as 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    return tree.map(lambda leaf: torch.randn(leaf.shape, generator=generator) * 0.5, params)
