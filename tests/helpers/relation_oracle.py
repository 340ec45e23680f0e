"""pFedPM's relation module in NumPy, pair by pair, and the gradient of its loss written out."""

import numpy as np

from pflmpi import tree

Weights = dict[str, np.ndarray]  # by path


def to_numpy(weights: tree.Tree) -> Weights:
    return {path: leaf.double().numpy().copy() for path, leaf in tree.leaves(weights)}


def windows(z: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The three neighbours of every place of the pair's two channels, [2, d, 3], zeros outside."""
    return np.lib.stride_tricks.sliding_window_view(np.pad(np.stack([z, c]), ((0, 0), (1, 1))), 3, axis=1)


def layers(w: Weights, z: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """The outputs of the convolution [8, d], of fc1 [64] (both after ReLU) and the score."""
    found = np.maximum(np.einsum("oik,itk->ot", w["conv/weight"], windows(z, c)) + w["conv/bias"][:, None], 0)
    hidden = np.maximum(w["fc1/weight"] @ found.ravel() + w["fc1/bias"], 0)
    return found, hidden, 1 / (1 + np.exp(-(w["fc2/weight"] @ hidden + w["fc2/bias"]).item()))


def scores(w: Weights, z: np.ndarray, c: np.ndarray) -> np.ndarray:
    """[B, K] for features [B, d] and class means [K, d]."""
    return np.array([[layers(w, one, mean)[2] for mean in c] for one in z])


def gradients(w: Weights, z: np.ndarray, c: np.ndarray, one_hot: np.ndarray, known: np.ndarray) -> Weights:
    """Of the mean over samples of the sum over known classes of (score - one_hot)^2."""
    total = {path: np.zeros_like(value) for path, value in w.items()}
    for s, j in np.ndindex(one_hot.shape):
        found, hidden, score = layers(w, z[s], c[j])
        error = known[j] * 2 * (score - one_hot[s, j]) / len(z) * score * (1 - score)
        back_hidden = error * w["fc2/weight"][0] * (hidden > 0)
        back_found = (w["fc1/weight"].T @ back_hidden).reshape(found.shape) * (found > 0)
        for path, slope in {
            "fc2/weight": error * hidden[None],
            "fc2/bias": np.array([error]),
            "fc1/weight": np.outer(back_hidden, found.ravel()),
            "fc1/bias": back_hidden,
            "conv/weight": np.einsum("ot,itk->oik", back_found, windows(z[s], c[j])),
            "conv/bias": back_found.sum(1),
        }.items():
            total[path] += slope
    return total
