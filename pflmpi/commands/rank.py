"""A rank of `pflmpi run` or `resume`: connected to the others, through all rounds, ended together with them."""

import argparse
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np

from pflmpi import early_signals, outside
from pflmpi.commands.launch import check_ranks, num_ranks, spawn
from pflmpi.commands.progress import RunProgress, show_summary
from pflmpi.config.load import Config
from pflmpi.errors import (
    PflmpiError,
    RunError,
    Stopped,
    TransportError,
    UserError,
    explained,
    show,
    write_exit_code,
)
from pflmpi.experiment.execute import RankContext, retry_after_rank_loss
from pflmpi.machine import cores, gpus
from pflmpi.runtime.config import LEAST_TIMEOUT
from pflmpi.runtime.devices import device_of, fix_kernels, limit_memory, place
from pflmpi.runtime.faults import CollectiveError, all_or_none
from pflmpi.runtime.gpu_placement import GpuPlacement
from pflmpi.runtime.progress import Observer
from pflmpi.runtime.stopping import Stop, noted_signals
from pflmpi.transports import introduce, open_transport, refuse_unless_fault_tolerant
from pflmpi.transports.base import Transport
from pflmpi.transports.detect import ALONE, Launch, detect
from pflmpi.transports.peers import Peer, ended
from pflmpi.transports.process_exit import exit_process
from pflmpi.transports.slurm import end_of_job

# The configuration, the folder of the run, and what starts or continues the run there and returns the folder.
Prepared = tuple[Config, Path, Callable[[Config, Path, RankContext, Observer], Path]]

# Seconds that the rank with the cause has to show it, and the launcher to stop us: an error that all ranks raise is
# shown by rank 0, and losing another rank is only a consequence.
_HEAD_START = 3.0
_log = logging.getLogger(__name__)


def run_rank(options: argparse.Namespace, prepare: Callable[[Launch], Prepared]) -> int:
    """Run an experiment on this rank, or start all ranks if no launcher has; return the exit code.

    Between ranks the process ends here: in order if all ranks know why, otherwise by aborting all of them.
    """
    launch, transport = ALONE, None
    try:
        launch = detect(os.environ)
        if launch.rank > 0:
            logging.getLogger().setLevel(logging.ERROR)
        check_ranks(options.ranks)
        config, folder, start = prepare(launch)
        if config.runtime.faults == "continue":
            refuse_unless_fault_tolerant(config.runtime.transport, launch)
        ranks = num_ranks(options.ranks, config, launch)
        if ranks > 1 and launch.kind == "alone":
            return spawn(ranks, options.words)
        transport = _connect(config, launch)
        placed = _place(config, transport)
        device = device_of(placed, transport.rank)
        fix_kernels(device, config.runtime, config.training)
        limit_memory(placed, transport.rank, config.runtime)
        if len(placed.gpu_ranks) > 1:
            transport.use_gpus(placed.gpu_ranks, device)
        if placed.serves_only:
            config = replace(config, runtime=config.runtime.model_copy(update={"server": "dedicated"}))
        stop = Stop(_end_of_job(transport), config.runtime.spare)
        context = RankContext(
            transport, device, placed.slots, placed.models, stop, launch.jobs, take_over=options.take_over
        )
        with (
            RunProgress(config.training.rounds, options.quiet, options.bar, transport.rank) as progress,
            noted_signals(stop, lambda: bool(ended(context.transport.peers))),
        ):
            early_signals.begun()
            run = start(config, folder, context, progress)
        if transport.rank == 0:
            show_summary(run, config)
        _leave(transport, 0)
    except (CollectiveError, Stopped) as reason:  # on every rank
        assert transport is not None
        error: PflmpiError = Stopped(f"{reason}; `pflmpi resume {folder}` continues")
        if isinstance(reason, CollectiveError):
            error = reason.error
        if transport.rank == 0:
            if options.debug:
                traceback.print_exception(reason)
            show(error)
        with suppress(TransportError):
            transport.barrier()  # so that no launcher kills rank 0 before it has shown the error
        _leave(transport, error.exit_code)
    except KeyboardInterrupt:
        return _abort(transport, 130, launch.rank)
    except Exception as caught:
        where = None if isinstance(caught, PflmpiError) else outside.cause(caught)
        fault = RunError(where) if where else explained(caught, UserError if transport is None else RunError)
        if isinstance(fault, TransportError) or (transport is None and launch.rank > 0):
            time.sleep(_HEAD_START)
        show(fault, options.debug, launch.rank)
        return _abort(transport, fault.exit_code if isinstance(fault, PflmpiError) else RunError.exit_code, launch.rank)


def _connect(config: Config, launch: Launch) -> Transport:
    """Transport with all ranks known to each other."""
    runtime = config.runtime
    timeout = LEAST_TIMEOUT if runtime.timeout is None else runtime.timeout
    transport = open_transport(runtime.transport, launch, timeout, fault_tolerant=runtime.faults == "continue")
    seen = () if runtime.device == "cpu" else gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    retry_after_rank_loss(transport, lambda: introduce(transport, Peer.here(cores(), seen)))
    return transport


def _place(config: Config, transport: Transport) -> GpuPlacement:
    """Who computes where, the same on every rank; raises `CollectiveError` where that cannot be."""
    placed = retry_after_rank_loss(
        transport, lambda: all_or_none(transport, lambda: place(transport.peers, config.runtime, config.training))
    )
    if transport.rank == 0 and placed.remark():
        _log.warning("%s", placed.remark())
    return placed


def _end_of_job(transport: Transport) -> float | None:
    """End of this batch job; one rank asks, because a thousand would overwhelm the queue manager."""

    def ask() -> float:
        end = end_of_job(os.environ) if transport.rank == 0 else None
        return float(transport.maximum(np.array([-np.inf if end is None else end]))[0])

    end = retry_after_rank_loss(transport, ask)
    return None if end == -np.inf else end


def _leave(transport: Transport, code: int) -> NoReturn:
    """End in order with the other ranks."""
    if transport.rank == 0 or transport.fault_tolerant:  # rank 0 may die now
        write_exit_code(os.environ, code)
    exit_process(transport, code)


def _abort(transport: Transport | None, code: int, rank: int) -> int:
    """End all ranks; alone, return the code."""
    sys.stdout.flush()
    if (rank if transport is None else transport.rank) == 0:
        write_exit_code(os.environ, code)
    if transport is not None and transport.size > 1:
        transport.abort(code)
    return code
