"""Labels that are no classes: a number, several yes or no, and a token at each position.

    python examples/tasks.py examples
    pflmpi run examples/regression.yaml --out runs/regression
    pflmpi run examples/multilabel.yaml --out runs/multilabel
    pflmpi run examples/tokens.yaml --out runs/tokens

All data comes with scikit-learn. `regression.npz` has the progress of diabetes, its patients are divided by age;
`multilabel.npz` asks of handwritten digits whether they are even, above four, and closed; `tokens.npz` has pieces of
texts, each text a client, and the next character at every position.
"""

import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn

LENGTH, LETTERS = 24, " abcdefghijklmnopqrstuvwxyz"


class NextCharacters(nn.Module):
    """At every position the five characters up to it decide on the next one: scores [B, T, K]."""

    def __init__(self, num_classes: int, width: int = 32):
        super().__init__()
        self.tokens = nn.Embedding(len(LETTERS) + 1, width)
        self.before = nn.Conv1d(width, 2 * width, 5)
        self.head = nn.Linear(2 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        z = nn.functional.pad(self.tokens(x.long()).transpose(1, 2), (4, 0))
        return self.head(torch.relu(self.before(z)).transpose(1, 2))


def regression() -> dict[str, np.ndarray]:
    """x [n, 10]; y [n], the progress in hundreds; client [n], the patient's decile of age."""
    x, y = load_diabetes(return_X_y=True)
    return {"x": 20 * x, "y": y / 100, "client": np.argsort(np.argsort(x[:, 0])) * 10 // len(x)}


def multilabel() -> dict[str, np.ndarray]:
    """x [n, 8, 8] bytes; y [n, 3], whether the digit is even, above four, and has a closed line in it."""
    images, digits = load_digits().images, load_digits().target
    labels = [digits % 2 == 0, digits > 4, np.isin(digits, (0, 6, 8, 9))]
    return {"x": (15 * images).astype(np.uint8), "y": np.stack(labels, 1)}


def tokens() -> dict[str, np.ndarray]:
    """x [n, LENGTH]; y [n, LENGTH], the next character of each, -100 after the end of the text; client [n]."""
    x, y, client = [], [], []
    names = sorted(file.name for file in files("sklearn.datasets.descr").iterdir() if file.name.endswith(".rst"))
    for number, name in enumerate(names):
        text = " ".join((files("sklearn.datasets.descr") / name).read_text(encoding="utf-8").lower().split())
        found = np.array([LETTERS.find(character) % (len(LETTERS) + 1) for character in text])
        for begin in range(0, len(found) - 1, LENGTH):
            piece = found[begin : begin + LENGTH + 1]
            padding = LENGTH + 1 - len(piece)
            x.append(np.pad(piece[:-1], (0, padding)))
            y.append(np.pad(piece[1:], (0, padding), constant_values=-100))
            client.append(number)
    return {"x": np.array(x), "y": np.array(y), "client": np.array(client)}


if __name__ == "__main__":
    for write in (regression, multilabel, tokens):
        np.savez_compressed(Path(sys.argv[1]) / f"{write.__name__}.npz", **write())
