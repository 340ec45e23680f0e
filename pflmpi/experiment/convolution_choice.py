"""Choose how convolutions in lanes are computed: one rank measures, for all ranks and the whole run."""

import dataclasses
import logging

import numpy as np

from pflmpi.experiment.build import Experiment
from pflmpi.runtime.executors.lane_convolutions import WAYS, fastest
from pflmpi.runtime.placement import MOST_TOGETHER
from pflmpi.transports.base import Transport

_log = logging.getLogger(__name__)


def choose_convolutions(experiment: Experiment, transport: Transport, on_gpu: bool) -> Experiment:
    """The experiment with `runtime.lane_convolutions: measured` replaced by what the first rank that can finds faster.

    Args:
        on_gpu: clients are computed on GPUs, wherever this rank is.
    """
    runtime = experiment.config.runtime
    if runtime.lane_convolutions != "measured":
        return experiment
    can = not on_gpu or experiment.tasks[0].device.type != "cpu"

    first = -transport.maximum(np.array([-float(transport.rank) if can else -np.inf]))[0]
    mine = -1
    if transport.rank == first:
        mine = WAYS.index(fastest(experiment.tasks, min(runtime.lanes or 1, MOST_TOGETHER)))
    way = WAYS[int(transport.maximum(np.array([float(mine)]))[0])]
    if transport.rank == 0:
        _log.info("convolutions in lanes: %s, measured to be the fastest", way)
    runtime = runtime.model_copy(update={"lane_convolutions": way})
    return dataclasses.replace(experiment, config=dataclasses.replace(experiment.config, runtime=runtime))
