"""How many ranks a run has, and their start on this machine: as forks of this process, or as new ones."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pflmpi.early_signals import SIGNALS
from pflmpi.errors import ConfigError, RunError, Stopped, UserError
from pflmpi.machine import cores

if TYPE_CHECKING:
    from pflmpi.config.load import Config
    from pflmpi.runtime.config import RuntimeConfig
    from pflmpi.transports.detect import Launch


_MOST = 4096  # processes that `--ranks` starts on one machine


def check_ranks(ranks: int | None) -> None:
    """Raise if the number of ranks is impossible."""
    if ranks is not None and ranks < 1:
        raise ConfigError(f"--ranks {ranks}: must be at least 1")
    if ranks is not None and ranks > _MOST:
        raise ConfigError(f"--ranks {ranks}: one machine starts at most {_MOST}; for more use a launcher on several")


def default_ranks(runtime: "RuntimeConfig", jobs: int = 1) -> int:
    """Ranks of a run started alone: one per GPU that it may use, otherwise one per `threads` cores.

    Args:
        jobs: runs at a time, which share them.
    """
    gpus = num_gpus(runtime, jobs)
    return max(1, len(cores()) // (jobs * runtime.threads) if gpus is None else gpus)


def num_gpus(runtime: "RuntimeConfig", jobs: int = 1) -> int | None:
    """GPUs of this node that each of some runs at a time may use; None: they compute on CPUs."""
    if runtime.device == "cpu":
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    mine = torch.cuda.device_count() // jobs
    return min(mine, runtime.gpus or mine)


def num_ranks(asked: int | None, config: "Config", launch: "Launch") -> int:
    """Ranks of a run: those that a launcher has started, or those to start.

    Args:
        asked: by `--ranks`.
    """
    transport = config.runtime.transport
    if launch.kind != "alone":
        if asked not in (None, launch.size):
            raise ConfigError(
                f"--ranks {asked}, but {launch.kind} has started {launch.size} ranks; "
                "leave --ranks out under a launcher"
            )
        return launch.size
    if transport == "inprocess":
        if asked not in (None, 1):
            raise ConfigError(f"--ranks {asked} with runtime.transport = 'inprocess', which has 1; use auto")
        return 1
    if transport == "mpi":
        raise ConfigError(
            "runtime.transport = 'mpi', but no MPI has started this; use mpirun -n R pflmpi run ..., or auto"
        )
    return asked or default_ranks(config.runtime)


def start_ranks(ranks: int, words: Sequence[str], rank_main: Callable[[], int] | None) -> int:
    """Run `pflmpi WORDS` on new ranks; return its exit code.

    A rank that fails shows its own error, and the others are stopped.

    Args:
        rank_main: what a rank does in a fork of this process; None where it has asked for GPUs and cannot be forked.

    Raises:
        RunError: a rank has ended without showing why.
    """
    if rank_main is None:
        from pflmpi.transports.start.spawn import run_ranks

        failed = run_ranks(ranks, ["-m", "pflmpi", *words])
    else:
        from pflmpi.transports.start.fork import fork_ranks

        failed = fork_ranks(ranks, rank_main)
    if failed is None:
        return 0
    if failed.code in (UserError.exit_code, RunError.exit_code, Stopped.exit_code):
        return failed.code
    if -failed.code in SIGNALS[1:]:  # forwarded to a rank that did not yet watch for signals
        return Stopped.exit_code
    how = f"was killed by signal {-failed.code}" if failed.code < 0 else f"ended with {failed.code}"
    raise RunError(
        f"rank {failed.rank} {how}; all ranks were stopped; `pflmpi resume` continues from the newest checkpoint"
    )
