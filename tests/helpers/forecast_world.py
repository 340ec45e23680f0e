"""A run that has ended, and what was foreseen of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import harness
from pflmpi.config import load as configuration
from pflmpi.run.build import Experiment, prepare, setup
from pflmpi.runtime.setup import Setup
from pflmpi.transports.detect import Launch

SLOTS = 2  # as in `harness`


@dataclass(frozen=True)
class Foreseen:
    """An experiment that nothing was done with."""

    experiment: Experiment
    ready: Setup


def foreseen(raw: dict[str, Any], ranks: int) -> Foreseen:
    """The experiment of a configuration on some ranks."""
    experiment = prepare(configuration.parse(raw), torch.device("cpu"))
    return Foreseen(experiment, setup(experiment, Launch("mpi", 0, ranks, 0, ranks), SLOTS))


def both(raw: dict[str, Any], ranks: int, folder: Path) -> Foreseen:
    """Run a configuration on threads, and return what was foreseen of it."""
    harness.run(raw, folder, ranks)
    return foreseen(raw, ranks)
