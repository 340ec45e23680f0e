"""A run that is planned, and one that has ended."""

from dataclasses import dataclass

import torch

import quick_run
from pflmpi.config import load as configuration
from pflmpi.experiment.build import Experiment, prepare, setup
from pflmpi.runtime.round_schedule import schedule
from pflmpi.runtime.setup import Setup

SLOTS = 2  # as in `quick_run`


@dataclass(frozen=True)
class Planned:
    """An experiment that nothing was done with."""

    experiment: Experiment
    setup: Setup

    def schedule(self, done=None):
        """The opening, and the rounds after `done`."""
        config = self.experiment.config
        return schedule(self.setup, config.evaluation, config.checkpoint, done)


def planned(raw, ranks):
    """The experiment of a configuration on some ranks."""
    experiment = prepare(configuration.parse(raw), torch.device("cpu"))
    return Planned(experiment, setup(experiment, ranks, SLOTS))


def planned_and_run(raw, ranks, folder):
    """Run a configuration on threads; the same experiment before it."""
    quick_run.run(raw, folder, ranks)
    return planned(raw, ranks)
