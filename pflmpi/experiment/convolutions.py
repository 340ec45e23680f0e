"""`runtime.lane_convolutions: measured` becomes the way that one rank finds faster, for all ranks and the whole run."""

import dataclasses
import logging

import numpy as np

from pflmpi.experiment.build import Experiment
from pflmpi.experiment.retrying import retry_after_rank_loss
from pflmpi.runtime.executors.lane_convolutions import fastest
from pflmpi.runtime.faults import on_root
from pflmpi.runtime.placement import MOST_TOGETHER
from pflmpi.transports.base import Transport
from pflmpi.transports.text import gather_texts

_log = logging.getLogger(__name__)


def decided(experiment: Experiment, transport: Transport, on_gpu: bool) -> Experiment:
    """The experiment with `lane_convolutions` measured, where the configuration wants that, by the first rank that can.

    Args:
        on_gpu: clients are computed on GPUs, wherever this rank is.
    """
    runtime = experiment.config.runtime
    if runtime.lane_convolutions != "measured":
        return experiment
    can = not on_gpu or experiment.tasks[0].device.type != "cpu"

    def agreed() -> str:
        first = -transport.maximum(np.array([-float(transport.rank) if can else -np.inf]))[0]
        mine = fastest(experiment.tasks, min(runtime.lanes or 1, MOST_TOGETHER)) if transport.rank == first else ""
        texts = gather_texts(transport, mine)
        return on_root(transport, lambda: "".join(texts or ()))

    way = retry_after_rank_loss(transport, agreed)
    if transport.rank == 0:
        _log.info("convolutions in lanes: %s, measured to be the fastest", way)
    runtime = runtime.model_copy(update={"lane_convolutions": way})
    return dataclasses.replace(experiment, config=dataclasses.replace(experiment.config, runtime=runtime))
