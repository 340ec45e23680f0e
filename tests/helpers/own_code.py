"""Files that a user may have beside a configuration: an algorithm, a model, a dataset, a partition."""

import quick_run
from pflmpi.config import yaml_file

ALGORITHM = '''
from dataclasses import dataclass
from typing import ClassVar

from pflmpi.algorithms.shared_parts import WeightedSharedParts


@dataclass(frozen=True, kw_only=True)
class Mine(WeightedSharedParts):
    """A shared body."""

    summary: ClassVar[str] = "shared body, personal head"
    paper: ClassVar[str] = "nobody, 2026"
    predicts_with: ClassVar[tuple[str, ...]] = ("body",)
    shared: ClassVar[tuple[str, ...]] = ("body",)
    message: ClassVar[str] = "body"
    state: ClassVar[str] = "shared"

    factor: float = 1.0
'''
MODEL = '''
from dataclasses import dataclass
from typing import ClassVar

from pflmpi.models.mlp import MLP


@dataclass(frozen=True, kw_only=True)
class Narrow(MLP):
    """A perceptron."""

    name: ClassVar[str] = "narrow"
    hidden: int = 9
'''
DATA = '''
from dataclasses import dataclass

import numpy as np

from pflmpi.data.dataset import assemble
from pflmpi.data.sources.base import OwnSource


@dataclass(frozen=True, kw_only=True)
class Squares(OwnSource):
    """Bright squares, one size for each class."""

    samples: int = 300

    def read(self, root):
        rng = np.random.default_rng(5)
        labels = rng.integers(0, 4, self.samples)
        images = rng.integers(0, 60, (self.samples, 1, 6, 6)).astype(np.uint8)
        for image, label in zip(images, labels):
            image[0, : label + 2, : label + 2] += 120
        return assemble("squares", images, labels, np.zeros(self.samples, bool), 4)
'''
PARTITION = '''
import numpy as np


def in_turn(labels: np.ndarray, clients: int, rng: np.random.Generator, *, step: int = 1) -> list[np.ndarray]:
    """One sample after another."""
    return [np.arange(client, len(labels), clients * step) for client in range(clients)]
'''


def write(folder, **sections):
    """The four files and a configuration that names them; return the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("mine", ALGORITHM), ("narrow", MODEL), ("squares", DATA), ("in_turn", PARTITION)):
        (folder / f"{name}.py").write_text(text)
    raw = quick_run.settings(
        {
            "data": {"name": "./squares.py:Squares", "samples": 200},
            "partition": {"name": "./in_turn.py:in_turn", "clients": 5},
            "model": {"name": "./narrow.py:Narrow"},
            "algorithm": {"name": "./mine.py:Mine", "factor": 2.0},
        },
        **sections,
    )
    (folder / "own.yaml").write_text(yaml_file.dump(raw))
    return folder / "own.yaml"
