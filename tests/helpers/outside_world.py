"""What a user has beside an installed pflmpi: data of every kind, an installed package of their own, configurations."""

import shutil
from typing import Any

import torch
from safetensors.torch import save_file
from torchvision.models import shufflenet_v2_x0_5

import outside_data
import own_code
import table_file
from pflmpi.config import yaml_file
from project import ROOT

NETS = '''
import math

import torch
from torch import nn


class Net(nn.Module):
    """A hidden layer for samples of any shape."""

    def __init__(self, num_classes, shape, width: int = 12):
        super().__init__()
        self.hidden = nn.Linear(math.prod(shape), width)
        self.fc = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.fc(torch.relu(self.hidden(x.flatten(1))))


class Normed(nn.Module):
    """A convolution with batch norm."""

    def __init__(self, num_classes, in_channels):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(in_channels, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x):
        return self.fc(self.body(x).flatten(1))
'''
DARKER = '''
from pflmpi.models.noise import uniform


def darker(x, key):
    """Darker by up to a half."""
    return (x * (1 - uniform(key, (len(x), 1, 1, 1)) / 2)).to(x.dtype)
'''
PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "my-package"
version = "1.0"

[tool.setuptools]
packages = ["my_package"]

[project.entry-points]
"pflmpi.algorithms" = { fedmine = "my_package.fed:Mine" }
"pflmpi.models" = { mynet = "my_package.nets:Net" }
"pflmpi.data" = { squares = "my_package.squares:Squares" }
"pflmpi.partitions" = { by_turns = "my_package.parts:in_turn" }
"""
STOPPING = {"metric": "test_loss", "patience": 2, "min_delta": 100.0}  # so that the first round stays the best

# By name: a configuration, and the rounds that a whole run of it has.
CONFIGURATIONS: dict[str, tuple[dict[str, Any], int]] = {
    "pictures": (
        {
            "data": {
                "path": "pictures",
                "split": "official",
                "normalize": "standard",
                "transform": ["horizontal_flip", "./change.py:darker"],
            },
            "partition": {"name": "my_package.parts:in_turn", "clients": 5},
            "model": {"name": "torchvision.models:shufflenet_v2_x0_5", "head": "fc", "weights": "shuffle.pt"},
            "algorithm": {"name": "fedmine", "factor": 2.0},
            "training": {
                "optimizer": "adamw",
                "lr": 0.001,
                "keep_optimizer": True,
                "schedule": "cosine",
                "decay_rounds": 3,
                "warmup": 1,
                "clip_norm": 1.0,
                "label_smoothing": 0.1,
            },
            "evaluation": {"when": "both", "unseen": 0.2},
            "output": {"trackers": ["tensorboard"]},
        },
        2,
    ),
    "table": (
        {
            "data": {"path": "table.npz", "normalize": "standard"},
            "partition": {"name": "writers"},
            "model": {"name": "my_package.nets:Net", "head": "fc", "weights": "net.safetensors"},
            "algorithm": {"name": "examples/clipped.py:Clipped"},
            "training": {
                "momentum": 0.9,
                "schedule": "step",
                "lr_decay": 0.5,
                "decay_rounds": 2,
                "rounds": 6,
                "stop": STOPPING,
            },
        },
        3,
    ),
    "bytes": (
        {
            "data": {"path": "bytes.h5"},
            "partition": {"name": "exdir", "clients": 5, "classes_per_client": 2, "alpha": 0.5},
            "model": [{"name": "mynet", "head": "fc"}, {"name": "mlp", "hidden": 12}],
            "algorithm": {"name": "fedproto"},
            "training": {"optimizer": "adam", "participation": 0.6, "decay_by": "participations", "lr_decay": 0.9},
        },
        3,
    ),
    "squares": (
        {
            "data": {"name": "squares", "samples": 200},
            "partition": {"name": "by_turns", "clients": 5},
            "model": {"name": "mynet", "head": "fc", "width": 8},
            "algorithm": {"name": "my_package.fed:Mine"},
            "evaluation": {"unseen": 0.2},
        },
        3,
    ),
    "divided": (
        {
            "data": {"path": "divided", "split": "official"},
            "partition": {"name": "writers"},
            "model": {"name": "my_package.nets:Normed", "head": "fc", "norm": "group"},
            "algorithm": {"name": "examples/trimmed_mean.py:TrimmedMean", "trimmed": 0},
        },
        2,
    ),
    "own": (
        {
            "data": {"name": "./squares.py:Squares", "samples": 200},
            "partition": {"name": "./in_turn.py:in_turn", "clients": 5},
            "model": {"name": "./narrow.py:Narrow"},
            "algorithm": {"name": "./mine.py:Mine", "factor": 2.0},
        },
        2,
    ),
    "text": (
        {
            "data": {"path": "text.npz", "limit": 1000},
            "partition": {"name": "writers"},
            "model": {"name": "examples/text.py:NextCharacter", "head": "head", "width": 16},
            "algorithm": {"name": "fedper"},
            "training": {"optimizer": "adam", "lr": 0.003, "batch_size": 50},
        },
        2,
    ),
}


def write(folder):
    """Data, weights, own code and configurations, and a table for a sweep."""
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("*.npz", "__pycache__"))
    outside_data.write(folder)
    (folder / "change.py").write_text(DARKER)
    torch.manual_seed(0)
    torch.save(shufflenet_v2_x0_5(num_classes=9).state_dict(), folder / "shuffle.pt")
    made: dict[str, Any] = {}
    exec(NETS, made)
    save_file(made["Net"](2, (4,)).state_dict(), folder / "net.safetensors")
    own_code.write(folder)
    for name, (sections, rounds) in CONFIGURATIONS.items():
        training = {"lr": 0.05, "rounds": rounds, **sections.get("training", {})}
        (folder / f"{name}.yaml").write_text(yaml_file.dump({"seed": 3, **sections, "training": training}))
    table_file.write(folder, seeds=[0], columns={"few": {}}, rows={"Mine": {"algorithm": {"name": "./mine.py:Mine"}}})


def write_package(folder):
    """The source of a package with an algorithm, models, a dataset and a partition, registered by entry points."""
    (folder / "my_package").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    modules = {"fed": own_code.ALGORITHM, "squares": own_code.DATA, "parts": own_code.PARTITION, "nets": NETS}
    for name, text in {"__init__": "", **modules}.items():
        (folder / "my_package" / f"{name}.py").write_text(text)
