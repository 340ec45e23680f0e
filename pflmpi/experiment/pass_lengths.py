"""Whether the clients' passes over their data have a sensible length: neither none, nor one that no memory holds."""

import logging
from collections.abc import Mapping

import numpy as np

from pflmpi.errors import ConfigError
from pflmpi.learning.batch_order import num_samples
from pflmpi.learning.training import Pass, TrainingConfig

_MOST_STEPS = 1_000_000  # of one client in one round, whose order is drawn at once
_log = logging.getLogger(__name__)


def check_passes(training: TrainingConfig, passes: Mapping[str, Pass], num_train: np.ndarray) -> None:
    """Raise `ConfigError` for a pass that no client makes, or a client cannot finish; warn if some train nothing.

    Args:
        passes: of a round, by name.
        num_train: [N] training samples of each client.
    """
    largest = int(num_train.argmax())
    idle = np.zeros(len(num_train), bool)
    for name, length in passes.items():
        there = np.array([num_samples(int(count), length) for count in num_train])
        if (steps := training.num_steps(int(there[largest]), length)) > _MOST_STEPS:
            raise ConfigError(
                f"the pass {name!r} of client {largest} has {steps} steps in one round; allowed are {_MOST_STEPS}: "
                "lower training.epochs or training.steps, or raise training.batch_size"
            )
        if training.drop_last and (short := there < training.batch_size).all():
            raise ConfigError(
                f"training.batch_size = {training.batch_size} with training.drop_last leaves every client without a "
                f"batch: the largest, client {largest}, has {there[largest]} training samples"
                f"{'' if len(passes) == 1 else f' for the pass {name!r}'}; lower it, or set drop_last: false"
            )
        elif training.drop_last:
            idle |= short
    if idle.any():
        _log.warning(
            "%d of %d clients have fewer training samples than training.batch_size = %d, and with training.drop_last "
            "they train nothing",
            int(idle.sum()),
            len(idle),
            training.batch_size,
        )
