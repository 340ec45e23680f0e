"""`pflmpi run` and `pflmpi resume`, on every rank."""

import argparse
import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from pflmpi import config as configuration
from pflmpi import runs
from pflmpi.commands import launch as launching
from pflmpi.commands.display import Display
from pflmpi.config import Config
from pflmpi.errors import ConfigError, PflmpiError, RunError, TransportError
from pflmpi.runtime.devices import choose, fix_kernels, gpu_of_its_own
from pflmpi.runtime.faults import Agreed
from pflmpi.transports import open_transport
from pflmpi.transports.base import Transport
from pflmpi.transports.detect import ALONE, Launch, detect

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
        config = _configuration(options)
        ranks = _ranks(options, config, launch)
        if ranks > 1 and launch.kind == "alone":
            return launching.spawn(ranks, given)
        device = choose(config.runtime, config.training, launch.local_rank, launch.local_size)
        fix_kernels(device, config.runtime, config.training)
        backend = "nccl" if gpu_of_its_own(device, config.runtime, launch.local_size) else "gloo"
        transport = open_transport(config.runtime.transport, launch, config.runtime.timeout, backend, str(device))
        place = runs.Place(transport, launch, device, _slots(config, launch))
        display = Display(config, options.quiet or transport.rank != 0, options.bar)
        if options.command == "run":
            run = runs.start(config, options.out or _folder(options.config), place, display)
        else:
            run = runs.resume(config, options.run, place, display)
        if transport.rank == 0:
            display.finish(run, config)
        transport.exit(0)
    except Agreed as agreed:
        assert transport is not None
        if transport.rank == 0:
            if options.debug:
                traceback.print_exception(agreed)
            launching.report(agreed.error)
        transport.barrier()  # so that no launcher kills rank 0 before it has shown the error
        transport.exit(agreed.error.exit_code)
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
    return runs.stored_config(options.run, options.overrides)


def _ranks(options: argparse.Namespace, config: Config, launch: Launch) -> int:
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


def _slots(config: Config, launch: Launch) -> int:
    """Return how many ranks of the whole run can compute at once, if all nodes are like this one."""
    nodes = max(launch.size // max(launch.local_size, 1), 1)
    on_cpu = config.runtime.device == "cpu" or launching.default_ranks("auto") == launching.cores()
    here = launching.cores() // config.runtime.threads if on_cpu else launching.default_ranks("auto")
    return max(here, 1) * nodes


def _folder(config: Path) -> Path:
    return Path("runs") / f"{config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def _show(error: BaseException, debug: bool, rank: int = 0) -> None:
    if debug:
        traceback.print_exception(error)
    launching.report(error, rank)


def _stop(transport: Transport | None, code: int) -> int:
    sys.stdout.flush()
    if transport is not None and transport.size > 1:
        transport.abort(code)
    return code


def _log_to_stderr(launch: Launch, debug: bool) -> None:
    level = logging.DEBUG if debug else logging.WARNING
    logging.basicConfig(level=level if launch.rank == 0 else max(level, logging.ERROR), format="pflmpi: %(message)s")
