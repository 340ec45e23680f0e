"""Starting one process per rank on this machine, through torch.distributed's own launcher."""

import logging
import os
import sys
import uuid
from collections.abc import Sequence

from pflmpi.errors import ConfigError, PflmpiError, RunError

_KNOWN_CODES = (2, 3)


def default_ranks(device: str) -> int:
    """Return how many ranks a run started alone has: one per GPU, otherwise one per core it may use."""
    if device != "cpu":
        import torch

        if torch.cuda.is_available():
            return torch.cuda.device_count()
    return cores()


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spawn(ranks: int, arguments: Sequence[str]) -> int:
    """Run `pflmpi ARGUMENTS` on that many ranks and return the exit code of the run.

    A rank that fails has shown its own error; the others are stopped, and its code is returned (3 if it was killed).
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # its report of a failure is a page long
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # otherwise the launcher warns that it sets it
    try:
        elastic_launch(config, sys.executable)("-m", "pflmpi", *arguments)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode in _KNOWN_CODES:
            return int(failure.exitcode)
        how = f"was killed by signal {-failure.exitcode}" if failure.exitcode < 0 else f"ended with {failure.exitcode}"
        report(RunError(f"rank {rank} {how}; all ranks were stopped; `pflmpi resume` continues from the newest checkpoint"))
        return RunError.exit_code
    return 0


def check_ranks(ranks: int | None) -> None:
    """Refuse an impossible number of ranks."""
    if ranks is not None and ranks < 1:
        raise ConfigError(f"--ranks {ranks}: must be at least 1")


def report(error: BaseException, rank: int = 0) -> None:
    """Show one error on the terminal, in one piece."""
    text = str(error) if isinstance(error, PflmpiError) else f"internal error: {error!r}; --debug shows where"
    where = f"rank {rank}: " if rank else ""
    os.write(2, f"pflmpi: {where}{text}\n".encode())  # one write: lines of several ranks do not mix
