"""Starting one process per rank on this machine, through torch.distributed's own launcher."""

import os
from collections.abc import Sequence

from pflmpi.errors import ConfigError, PflmpiError, RunError
from pflmpi.machine import cores

_KNOWN_CODES = (2, 3, 75)


def default_ranks(device: str) -> int:
    """Return how many ranks a run started alone has: one per GPU, otherwise one per core it may use."""
    if device != "cpu":
        import torch

        if torch.cuda.is_available():
            return torch.cuda.device_count()
    return len(cores())


def spawn(ranks: int, arguments: Sequence[str]) -> int:
    """Run `pflmpi ARGUMENTS` on that many ranks and return the exit code of the run.

    A rank that fails has shown its own error; the others are stopped, and its code is returned (3 if it was killed).
    """
    from pflmpi.transports.spawn import run_ranks

    failed = run_ranks(ranks, ["-m", "pflmpi", *arguments])
    if failed is None:
        return 0
    if failed.code in _KNOWN_CODES:
        return failed.code
    how = f"was killed by signal {-failed.code}" if failed.code < 0 else f"ended with {failed.code}"
    report(
        RunError(
            f"rank {failed.rank} {how}; all ranks were stopped; `pflmpi resume` continues from the newest checkpoint"
        )
    )
    return RunError.exit_code


def check_ranks(ranks: int | None) -> None:
    """Refuse an impossible number of ranks."""
    if ranks is not None and ranks < 1:
        raise ConfigError(f"--ranks {ranks}: must be at least 1")


def report(error: BaseException, rank: int = 0) -> None:
    """Show one error on the terminal, in one piece."""
    text = str(error) if isinstance(error, PflmpiError) else f"internal error: {error!r}; --debug shows where"
    where = f"rank {rank}: " if rank else ""
    os.write(2, f"pflmpi: {where}{text}\n".encode())  # one write: lines of several ranks do not mix
