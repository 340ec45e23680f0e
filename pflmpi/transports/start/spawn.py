"""Starting one process per rank on this machine, through torch.distributed's own launcher."""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pflmpi import early_signals
from pflmpi.errors import Stopped
from pflmpi.transports.detect import new_run_id

SHUTDOWN = "8"  # seconds for the other ranks to end when one has died
HERE = "127.0.0.1"  # other machines cannot connect to it


@dataclass(frozen=True)
class Failed:
    """The rank that failed first, and its exit code (negative: the signal that killed it)."""

    rank: int
    code: int


def run_ranks(ranks: int, arguments: Sequence[str]) -> Failed | None:
    """Run this Python with the arguments on every rank; None when all succeeded.

    Signals that ask for a stop are forwarded to the ranks as `early_signals.FORWARDED`. Ranks receive SIGTERM only
    when one of them has died.
    """
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from pflmpi.transports.torch_store import listen

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # its failure report is a page long
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # otherwise the launcher sets it and warns
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN)
    keep_to_this_machine()
    listening = listen(HERE, 0)
    port = listening.getsockname()[1]
    # The launcher opens this store again by its port; left to itself, it would open one that listens on all addresses.
    store = TCPStore(HERE, port, is_master=True, multi_tenant=True, master_listen_fd=listening.detach())
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=new_run_id(),
        rdzv_backend="static",
        rdzv_endpoint=f"{store.host}:{store.port}",
        rdzv_configs={"rank": 0},
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
        signals_to_handle="SIGINT,SIGQUIT",
    )
    try:
        with forwarding(lambda: _children([sys.executable, *arguments])):
            elastic_launch(config, sys.executable)(*arguments)
    except SignalException as stopped:
        raise KeyboardInterrupt from stopped
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        return Failed(rank, failure.exitcode)
    return None


def keep_to_this_machine() -> None:
    """Let gloo use the loopback interface; an interface that the user has named stays."""
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


@contextlib.contextmanager
def forwarding(children: Callable[[], Sequence[int]]) -> Iterator[None]:
    """Forward signals that ask for a stop to the processes that `children` names when one comes."""

    def send(number: int, _: object) -> None:
        ranks = children()
        if not ranks:
            raise Stopped(f"{early_signals.described(number)} before the run had begun; start it again")
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, early_signals.FORWARDED[number])

    before = {
        number: signal.signal(number, send) for number in early_signals.asking() if number in early_signals.FORWARDED
    }
    early_signals.begun()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _children(command: Sequence[str]) -> list[int]:
    """The children of this process that run a command."""
    children = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if parent == os.getpid() and words[: len(command)] == [os.fsencode(word) for word in command]:
                children.append(int(entry.name))
    return children
