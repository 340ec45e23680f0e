"""The data of a run that is opened again: the same samples, normalised as the run has recorded."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from pflmpi.config import stored
from pflmpi.errors import CheckpointError
from pflmpi.experiment.build import Experiment
from pflmpi.store import run_folder


def on_recorded_data(run: Path, experiment: Experiment) -> Experiment:
    """The experiment with the means and deviations of a run, whose last digits another NumPy may compute otherwise.

    Raises:
        CheckpointError: data or partition are not those that the run was made with.
    """
    recorded = stored.read(run)["recorded"]
    found = {"data": experiment.federation.dataset.digest, "partition": experiment.division.digest}
    for key, value in found.items():
        if recorded.get(key, value) != value:
            raise CheckpointError(
                f"the {key} has changed since {run} was written: hash {str(recorded[key])[:12]} then, "
                f"{value[:12]} now; put back the same files, or start a new run"
            )
    figures = {name: tuple(values.tolist()) for name, values in _normalisation(run).items()}
    return replace(experiment, tasks=tuple(task.replace(**figures) for task in experiment.tasks))


def _normalisation(run: Path) -> dict[str, np.ndarray]:
    """As the newest readable round has it, which all rounds of a run share; empty if none has any."""
    for round in reversed(run_folder.rounds(run)):
        with suppress(CheckpointError):
            return run_folder.read_normalisation(run, round)
    return {}
