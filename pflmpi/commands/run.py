"""`pflmpi run` and `pflmpi resume`, on every rank."""

import argparse
import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch

from pflmpi.commands import launch as launching
from pflmpi.commands.progress import Display
from pflmpi.config import load as configuration
from pflmpi.config.load import Config
from pflmpi.errors import ConfigError, PflmpiError, RunError, Stopped, TransportError
from pflmpi.machine import cores
from pflmpi.run.execute import RankContext
from pflmpi.run.start import resume, start, start_or_resume, stored_config
from pflmpi.runtime.config import LEAST_TIMEOUT
from pflmpi.runtime.devices import choose, fix_kernels, for_peers, gpu_of_its_own, limit_memory, slots
from pflmpi.runtime.faults import CollectiveError
from pflmpi.runtime.stopping import Stop, noted_signals
from pflmpi.transports import open_transport, refuse_unless_fault_tolerant
from pflmpi.transports.base import Transport
from pflmpi.transports.detect import ALONE, Launch, detect
from pflmpi.transports.peers import all_slots, ended
from pflmpi.transports.process_exit import exit_process
from pflmpi.transports.slurm import end_of_job

# Seconds that the rank with the cause has to show it, and the launcher to stop us: an error that all ranks find alike
# is rank 0's to show, and losing another rank is only a consequence.
_HEAD_START = 3.0


def main(options: argparse.Namespace, given: Sequence[str]) -> int:
    """Run or continue an experiment; return the exit code."""
    transport: Transport | None
    display: Display | None
    launch, transport, display = ALONE, None, None
    try:
        launch = detect(os.environ)
        _log_to_stderr(launch, options.debug)
        launching.check_ranks(options.ranks)
        folder, go_on = _folder(options, launch)
        config = _configuration(options)
        ranks = _ranks(options, config, launch)
        if ranks > 1 and launch.kind == "alone":
            return launching.spawn(ranks, given)
        device = choose(config.runtime, config.training, launch)
        fix_kernels(device, config.runtime, config.training)
        limit_memory(device, config.runtime, launch)
        transport = _connect(config, launch, device)
        config = replace(config, runtime=for_peers(config.runtime, transport.peers))
        stop = Stop(end_of_job(os.environ) if transport.rank == 0 else None, config.runtime.spare)
        place = RankContext(transport, launch, device, all_slots(transport.peers), stop)
        display = Display(config, options.quiet or transport.rank != 0, options.bar)
        with noted_signals(stop, lambda: bool(ended(place.transport.peers))):
            if options.command == "resume":
                run = resume(config, folder, place, display)
            else:
                run = (start_or_resume if go_on else start)(config, folder, place, display)
        if transport.rank == 0:
            display.finish(run, config)
        _leave(transport, 0)
    except CollectiveError as agreed:
        assert transport is not None
        if transport.rank == 0:
            if options.debug:
                traceback.print_exception(agreed)
            launching.report(agreed.error)
        transport.barrier()  # so that no launcher kills rank 0 before it has shown the error
        _leave(transport, agreed.error.exit_code)
    except Stopped as stopped:
        assert transport is not None
        if transport.rank == 0:
            launching.report(Stopped(f"{stopped}; `pflmpi resume {folder}` continues"))
        transport.barrier()
        _leave(transport, stopped.exit_code)
    except KeyboardInterrupt:
        return _stop(transport, 130)
    except PflmpiError as error:
        if isinstance(error, TransportError) or (transport is None and launch.rank > 0):
            time.sleep(_HEAD_START)
        _show(error, options.debug, launch.rank)
        return _stop(transport, error.exit_code)
    except Exception as error:
        _show(error, options.debug, launch.rank)
        return _stop(transport, RunError.exit_code)
    finally:
        if display is not None:
            display.close()


def _configuration(options: argparse.Namespace) -> Config:
    if options.command == "run":
        return configuration.load(options.config, options.overrides)
    return stored_config(options.run, options.overrides)


def _ranks(options: argparse.Namespace, config: Config, launch: Launch) -> int:
    if config.runtime.faults == "continue":
        refuse_unless_fault_tolerant(config.runtime.transport, launch)
    if launch.kind != "alone":
        if options.ranks is not None and options.ranks != launch.size:
            raise ConfigError(
                f"--ranks {options.ranks}, but {launch.kind} has started {launch.size} ranks; "
                "leave --ranks out under a launcher"
            )
        return launch.size
    if config.runtime.transport == "inprocess":
        if (options.ranks or 1) > 1:
            raise ConfigError(f"--ranks {options.ranks} with runtime.transport = 'inprocess', which has 1; use auto")
        return 1
    if config.runtime.transport == "mpi":
        raise ConfigError(
            "runtime.transport = 'mpi', but no MPI has started this; use mpirun -n R pflmpi run ..., or auto"
        )
    return int(options.ranks or launching.default_ranks(config.runtime.device))


def _connect(config: Config, launch: Launch, device: torch.device) -> Transport:
    """Return the transport, with all ranks known to each other."""
    runtime = config.runtime
    backend = "nccl" if gpu_of_its_own(device, runtime, launch) else "gloo"
    timeout = LEAST_TIMEOUT if runtime.timeout is None else runtime.timeout
    fault_tolerant = runtime.faults == "continue"
    transport = open_transport(runtime.transport, launch, timeout, backend, str(device), fault_tolerant)
    transport.introduce(device.type, slots(runtime, len(cores())))
    return transport


def _folder(options: argparse.Namespace, launch: Launch) -> tuple[Path, bool]:
    """Return the folder of the run, and whether a run that is there is to be continued."""
    if options.command == "resume":
        return options.run, True
    restarted = launch.restarts > 0
    if options.out is None and (options.go_on or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"):
        who = "--continue" if options.go_on else "torchrun --max-restarts"
        raise ConfigError(f"{who} without --out: a run that is started again must find its folder; give --out DIR")
    default = Path("runs") / f"{options.config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    return options.out or default, options.go_on or restarted


def _show(error: BaseException, debug: bool, rank: int = 0) -> None:
    if debug:
        traceback.print_exception(error)
    launching.report(error, rank)


def _stop(transport: Transport | None, code: int) -> int:
    sys.stdout.flush()
    if transport is not None:
        _tell(transport, code)
        if transport.size > 1:
            transport.abort(code)
    return code


def _leave(transport: Transport, code: int) -> NoReturn:
    _tell(transport, code)
    exit_process(transport, code)


def _tell(transport: Transport, code: int) -> None:
    """Leave rank 0's exit code in a file, for a launcher whose own says nothing (mpirun --with-ft)."""
    path = os.environ.get("PFLMPI_EXIT_FILE")
    if path and transport.rank == 0:
        Path(path).write_text(f"{code}\n")


def _log_to_stderr(launch: Launch, debug: bool) -> None:
    level = logging.DEBUG if debug else logging.WARNING
    logging.basicConfig(level=level if launch.rank == 0 else max(level, logging.ERROR), format="pflmpi: %(message)s")
