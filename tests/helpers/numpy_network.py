"""A two-layer network in NumPy, with its gradients written out: what the product's steps are compared with."""

import numpy as np

Weights = dict[str, np.ndarray]  # W1 [h, i], b1 [h], W2 [K, h], b2 [K]


def forward(w, x):
    """Return features [B, h] and logits [B, K]."""
    z = np.maximum(x @ w["W1"].T + w["b1"], 0)
    return z, z @ w["W2"].T + w["b2"]


def softmax(scores):
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def gradients(w, x, y, dz_extra=None):
    """Return the gradients of the mean cross-entropy, plus a term whose gradient by the features is given."""
    z, scores = forward(w, x)
    error = softmax(scores)
    error[np.arange(len(y)), y] -= 1
    error /= len(y)
    dz = error @ w["W2"]
    if dz_extra is not None:
        dz = dz + dz_extra
    dz = dz * (z > 0)
    return {"W1": dz.T @ x, "b1": dz.sum(0), "W2": error.T @ z, "b2": error.sum(0)}
