"""A rank of `pflmpi run` or `resume`: connected to the others, through all rounds, ended together with them."""

import argparse
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch

from pflmpi.commands.launch import check_ranks, num_ranks, spawn
from pflmpi.commands.progress import RunProgress, show_summary
from pflmpi.config.load import Config
from pflmpi.errors import PflmpiError, RunError, Stopped, TransportError, show
from pflmpi.machine import cores
from pflmpi.run.execute import RankContext
from pflmpi.runtime.config import LEAST_TIMEOUT
from pflmpi.runtime.devices import choose, fix_kernels, for_peers, gpu_of_its_own, limit_memory, slots
from pflmpi.runtime.faults import CollectiveError
from pflmpi.runtime.progress import Observer
from pflmpi.runtime.stopping import Stop, noted_signals
from pflmpi.transports import open_transport, refuse_unless_fault_tolerant
from pflmpi.transports.base import Transport
from pflmpi.transports.detect import ALONE, Launch, detect
from pflmpi.transports.peers import all_slots, ended
from pflmpi.transports.process_exit import exit_process, write_exit_code
from pflmpi.transports.slurm import end_of_job

# The configuration, the folder of the run, and what starts or continues the run there and returns the folder.
Prepared = tuple[Config, Path, Callable[[Config, Path, RankContext, Observer], Path]]

# Seconds that the rank with the cause has to show it, and the launcher to stop us: an error that all ranks raise is
# shown by rank 0, and losing another rank is only a consequence.
_HEAD_START = 3.0


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
        device = choose(config.runtime, config.training, launch)
        fix_kernels(device, config.runtime, config.training)
        limit_memory(device, config.runtime, launch)
        transport = _connect(config, launch, device)
        config = replace(config, runtime=for_peers(config.runtime, transport.peers))
        stop = Stop(end_of_job(os.environ) if transport.rank == 0 else None, config.runtime.spare)
        context = RankContext(transport, device, all_slots(transport.peers), stop)
        quiet = options.quiet or transport.rank != 0
        with (
            RunProgress(config.training.rounds, quiet, options.bar) as progress,
            noted_signals(stop, lambda: bool(ended(context.transport.peers))),
        ):
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
        transport.barrier()  # so that no launcher kills rank 0 before it has shown the error
        _leave(transport, error.exit_code)
    except KeyboardInterrupt:
        return _abort(transport, 130)
    except Exception as error:
        if isinstance(error, TransportError) or (transport is None and launch.rank > 0):
            time.sleep(_HEAD_START)
        show(error, options.debug, launch.rank)
        return _abort(transport, error.exit_code if isinstance(error, PflmpiError) else RunError.exit_code)


def _connect(config: Config, launch: Launch, device: torch.device) -> Transport:
    """Transport with all ranks known to each other."""
    runtime = config.runtime
    backend = "nccl" if gpu_of_its_own(device, runtime, launch) else "gloo"
    timeout = LEAST_TIMEOUT if runtime.timeout is None else runtime.timeout
    fault_tolerant = runtime.faults == "continue"
    transport = open_transport(runtime.transport, launch, timeout, backend, str(device), fault_tolerant)
    transport.introduce(device.type, slots(runtime, len(cores())))
    return transport


def _leave(transport: Transport, code: int) -> NoReturn:
    """End in order with the other ranks."""
    if transport.rank == 0:
        write_exit_code(os.environ, code)
    exit_process(transport, code)


def _abort(transport: Transport | None, code: int) -> int:
    """End all ranks; alone, return the code."""
    sys.stdout.flush()
    if transport is not None:
        if transport.rank == 0:
            write_exit_code(os.environ, code)
        if transport.size > 1:
            transport.abort(code)
    return code
