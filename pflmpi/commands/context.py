"""How a rank gets to the others, and where it computes."""

import logging
import os
from dataclasses import replace
from functools import partial

import numpy as np

from pflmpi.config.load import Config
from pflmpi.experiment.run import RankContext
from pflmpi.machine import cores, gpus
from pflmpi.runtime.config import LEAST_TIMEOUT
from pflmpi.runtime.devices import device_of, fix_kernels, gpu_messages, limit_memory, place
from pflmpi.runtime.faults import all_or_none
from pflmpi.runtime.stopping import Stop
from pflmpi.transports import introduce, open_transport
from pflmpi.transports.base import Transport
from pflmpi.transports.detect import Launch
from pflmpi.transports.peers import Peer
from pflmpi.transports.process_exit import exit_unconnected
from pflmpi.transports.slurm import end_of_job

_log = logging.getLogger(__name__)


def connect(config: Config, launch: Launch) -> Transport:
    """The transport to the ranks that were started with this one."""
    runtime = config.runtime
    timeout = LEAST_TIMEOUT if runtime.timeout is None else runtime.timeout
    late = partial(exit_unconnected, launch.rank, os.environ)
    return open_transport(runtime.transport, launch, timeout, late)


def here(config: Config) -> Peer:
    """This process, and what it sees."""
    seen = () if config.runtime.device == "cpu" else gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return Peer.here(cores(), seen)


def context_of(
    config: Config, transport: Transport, launch: Launch, stop: Stop, take_over: bool = False
) -> tuple[Config, RankContext]:
    """Where this rank computes, once all ranks know each other, and the configuration with what follows from that.

    Raises:
        CollectiveError: on all ranks, where the ranks cannot compute together.
    """
    introduce(transport, here(config))
    placed = all_or_none(transport, lambda: place(transport.peers, config.runtime, config.training))
    if transport.rank == 0 and placed.remark():
        _log.warning("%s", placed.remark())
    device = device_of(placed, transport.rank)
    fix_kernels(device, config.runtime, config.training)
    limit_memory(placed, transport.rank, config.runtime)
    between_gpus = gpu_messages(placed, transport.name)
    if between_gpus.ranks:
        transport.use_gpus(between_gpus.ranks, device)
    if between_gpus.text and transport.rank == 0:
        _log.info("large messages: %s", between_gpus.text)
    if placed.serves_only:
        config = replace(config, runtime=config.runtime.model_copy(update={"server": "dedicated"}))
    context = RankContext(transport, device, placed.slots, placed.models, stop, launch.jobs, take_over)
    return config, context


def end_of_jobs(transport: Transport) -> float | None:
    """End of this batch job; one rank asks, because a thousand would overwhelm the queue manager."""

    own = end_of_job(os.environ) if transport.rank == 0 else None
    end = float(transport.maximum(np.array([-np.inf if own is None else own]))[0])
    return None if end == -np.inf else end
