"""Starting one process per rank on this machine, through torch.distributed's own launcher."""

import logging
import os
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Failed:
    """The rank that failed first, and its exit code (the negative of a signal that killed it)."""

    rank: int
    code: int


def run_ranks(ranks: int, arguments: Sequence[str]) -> Failed | None:
    """Run this Python with the arguments on every rank; None when all have ended well."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # its report of a failure is a page long
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # otherwise the launcher sets it and warns
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
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except SignalException as stopped:
        raise KeyboardInterrupt from stopped
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        return Failed(rank, failure.exitcode)
    return None
