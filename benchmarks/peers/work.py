"""The work that all simulators do: clients, samples and networks, in plain PyTorch. Imported in every environment."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

CIFAR, MNIST = (3, 32, 32), (1, 28, 28)
TESTS = 2  # test samples of a client, for simulators that want some; nothing is tested while time is taken
CLASSES, LR = 10, 0.03


@dataclass(frozen=True)
class Work:
    """Local epochs of SGD on samples that are the same number for every client.

    Attributes:
        shape: of a sample.
        samples: training samples of a client.
        cohort: participants of a round.
        rounds: of one run; the first one warms up.
        model: as pflmpi calls it.
        algorithm: as pflmpi calls it; simulators without it are left out.
    """

    shape: tuple[int, int, int]
    clients: int
    samples: int
    cohort: int
    batch: int
    rounds: int
    model: str
    epochs: int = 1
    algorithm: str = "fedavg"


WORKS = {
    "cnn": Work(CIFAR, clients=1000, samples=50, cohort=50, batch=10, rounds=7, model="cnn"),
    "mlp": Work(MNIST, clients=100, samples=600, cohort=20, batch=10, rounds=12, model="mlp"),
    "resnet18": Work(CIFAR, clients=100, samples=100, cohort=4, batch=20, rounds=7, model="resnet18"),
    # A large model beside little compute: torchvision's, with its 7x7 stem.
    "resnet18-7x7": Work(CIFAR, 100, samples=100, cohort=4, batch=20, rounds=9, model="torchvision.models:resnet18"),
    "logistic": Work(MNIST, clients=1000, samples=60, cohort=10, batch=10, rounds=60, model="logistic"),
    # As PFLlib's authors use it: 100 clients, a fifth of them a round, batches of 100.
    "fedgh": Work(CIFAR, 100, samples=450, cohort=20, batch=100, rounds=5, model="cnn", epochs=2, algorithm="fedgh"),
    # Only to see that they run.
    "tiny": Work(MNIST, clients=6, samples=20, cohort=2, batch=10, rounds=3, model="logistic"),
    "tiny-fedgh": Work(CIFAR, 6, samples=20, cohort=2, batch=10, rounds=3, model="cnn", epochs=2, algorithm="fedgh"),
}
TINY = ("tiny", "tiny-fedgh")


def write(work: Work, path: Path) -> None:
    """Random bytes, a label of `CLASSES` for each, whose sample it is, and which ones are for tests."""
    rng, each = np.random.default_rng(0), work.samples + TESTS
    count = work.clients * each
    np.savez(
        path,
        x=rng.integers(0, 256, (count, *work.shape), np.uint8),
        y=rng.integers(0, CLASSES, count),
        client=np.arange(count) // each,
        test=np.arange(count) % each >= work.samples,
    )


def read(path: Path) -> tuple[list[Tensor], list[Tensor]]:
    """The training samples of each client, from -1 to 1, and their labels."""
    with np.load(path) as file:
        train = ~file["test"]
        x, y, clients = file["x"][train], file["y"][train], file["client"][train]
    count = int(clients[-1]) + 1
    images = torch.from_numpy(x).float().div_(127.5).sub_(1)
    return list(images.chunk(count)), list(torch.from_numpy(y).chunk(count))


def network(work: Work) -> nn.Module:
    """The network, as one would write it."""
    channels, height, width = work.shape
    if work.model == "logistic":
        return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, CLASSES))
    if work.model == "mlp":
        return nn.Sequential(
            nn.Flatten(), nn.Linear(channels * height * width, 100), nn.ReLU(), nn.Linear(100, CLASSES)
        )
    if work.model == "cnn":
        return nn.Sequential(
            nn.Conv2d(channels, 32, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(32, 64, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(1600, 512),
            nn.ReLU(),
            nn.Linear(512, CLASSES),
        )
    from torchvision.models import resnet18

    made = resnet18(num_classes=CLASSES)
    if work.model != "resnet18":
        return made
    made.conv1 = nn.Conv2d(channels, 64, 3, stride=1, padding=1, bias=False)
    made.maxpool = nn.Identity()
    return made


@cache
def kept(work: Work, path: Path) -> tuple[list[Tensor], list[Tensor], nn.Module]:
    """Samples, labels and a network, made once in a process that is asked for one client after another."""
    return *read(path), network(work)


def epoch(work: Work, x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The shuffled minibatches of a client."""
    order = torch.randperm(len(y))
    return [(x[places], y[places]) for places in order.split(work.batch)]
