"""Decides how many ranks a run has, and starts them on this machine: as forks of this process or as new processes."""

import itertools
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from pflmpi.early_signals import FORWARDED, describe_signal, list_stop_signals
from pflmpi.errors import ConfigError, RunError, Stopped, UserError
from pflmpi.machine import num_cores

if TYPE_CHECKING:
    from pflmpi.config.load import Config
    from pflmpi.runtime.config import RuntimeConfig
    from pflmpi.transports.detect import Launch
    from pflmpi.transports.start import Failed

_MOST_RANKS = 4096  # that `--ranks` starts on one machine


def check_alone(command: str, hint: str = "") -> None:
    """Raise if a launcher has started a command that starts ranks by itself."""
    from pflmpi.transports.detect import detect

    if (kind := detect(os.environ).kind) != "alone":
        raise ConfigError(
            f"{command} starts its runs by itself, and {kind} has started this; start it without a launcher{hint}"
        )


def check_ranks(ranks: int | None) -> None:
    if ranks is not None and ranks < 1:
        raise ConfigError(f"--ranks {ranks}: must be at least 1")
    if ranks is not None and ranks > _MOST_RANKS:
        raise ConfigError(
            f"--ranks {ranks}: one machine starts at most {_MOST_RANKS}; for more use a launcher on several"
        )


def check_restarts(restarts: int, launch: "Launch", started_here: bool) -> None:
    """Raise if `--restarts` is negative or cannot work under a launcher.

    Args:
        started_here: whether this process is a rank that `pflmpi` itself has started.
    """
    if restarts < 0:
        raise ConfigError(f"--restarts {restarts}: must be at least 0")
    if restarts and launch.kind != "alone" and not started_here:
        raise ConfigError(
            f"--restarts {restarts}, but {launch.kind} has started the ranks, and it alone can start them again; "
            f"give it to the wrapper instead: launch/mpirun, launch/torchrun or launch/srun --restarts {restarts} ..."
        )


def default_ranks(runtime: "RuntimeConfig", jobs: int = 1) -> int:
    """Number of ranks of a run without a launcher: one per GPU that it may use, otherwise one per `threads` cores.

    Args:
        jobs: runs at a time, which share the GPUs or cores.
    """
    gpus = num_gpus(runtime, jobs)
    return max(1, num_cores(os.environ) // (jobs * runtime.threads) if gpus is None else gpus)


def num_gpus(runtime: "RuntimeConfig", jobs: int = 1) -> int | None:
    """Number of GPUs of this node for each of `jobs` runs at a time; None if they compute on CPUs."""
    if runtime.device == "cpu":
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    visible = torch.cuda.device_count() // jobs
    return min(visible, runtime.gpus or visible)


def num_ranks(requested: int | None, config: "Config", launch: "Launch") -> int:
    """Number of ranks of a run: those that a launcher has started, or those to start (`requested` by --ranks)."""
    transport = config.runtime.transport
    if launch.kind != "alone":
        if requested not in (None, launch.size):
            raise ConfigError(
                f"--ranks {requested}, but {launch.kind} has started {launch.size} ranks; "
                "leave --ranks out under a launcher"
            )
        return launch.size
    if transport == "inprocess":
        if requested not in (None, 1):
            raise ConfigError(f"--ranks {requested} with runtime.transport = 'inprocess', which has 1; use auto")
        return 1
    if transport == "mpi":
        raise ConfigError(
            "runtime.transport = 'mpi', but no MPI has started this; use mpirun -n R pflmpi run ..., or auto"
        )
    return requested or default_ranks(config.runtime)


def start_ranks(ranks: int, words: Sequence[str], rank_main: Callable[[], int] | None, restarts: int = 0) -> int:
    """Run `pflmpi WORDS` on new ranks; return its exit code.

    A rank that fails shows its own error, and the others are stopped.

    Args:
        rank_main: runs a rank in a fork of this process; None if this process has used the GPU driver, which forbids
            forks.
        restarts: how often all ranks are started again after one was killed.

    Raises:
        RunError: a rank has ended without showing why.
        Stopped: a signal stopped a rank before the run had begun.
    """
    from pflmpi.transports.detect import RESTARTED

    for restarted in itertools.count():
        os.environ[RESTARTED] = str(restarted)
        try:
            failed = _start_once(ranks, words, rank_main)
        finally:
            del os.environ[RESTARTED]
        killed = failed is not None and failed.code < 0 and -failed.code not in list_stop_signals()
        if not killed or restarted == restarts:
            break
        assert failed is not None
        event = f"rank {failed.rank} was killed by signal {-failed.code}; all start again from the newest checkpoint"
        print(f"pflmpi: {event} ({restarted + 1} of {restarts})", file=sys.stderr, flush=True)
    if failed is None:
        return 0
    if failed.code in (UserError.exit_code, RunError.exit_code, Stopped.exit_code):
        return failed.code
    if -failed.code in FORWARDED.values():  # the rank was not yet watching for signals
        raise Stopped(f"{describe_signal(-failed.code)} before the run had begun; start it again")
    how = f"was killed by signal {-failed.code}" if failed.code < 0 else f"ended with {failed.code}"
    goes_on = "`pflmpi resume` continues from the newest checkpoint, if there is one"
    raise RunError(f"rank {failed.rank} {how}; all ranks were stopped; {goes_on}")


def _start_once(ranks: int, words: Sequence[str], rank_main: Callable[[], int] | None) -> "Failed | None":
    """Start all ranks and wait for them; return the rank that failed first, None if all succeeded."""
    from pflmpi.transports.start import exec_python, fork_ranks

    return fork_ranks(ranks, rank_main or partial(exec_python, ["-P", "-m", "pflmpi", *words]))
