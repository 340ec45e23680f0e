"""Link between two ranks of a node, timed by two ranks: python -m pflmpi.forecast.links FILE."""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pflmpi.forecast.communication import Link
from pflmpi.transports import open_transport
from pflmpi.transports.base import Transport
from pflmpi.transports.detect import detect
from pflmpi.transports.process_exit import exit_process
from pflmpi.transports.start.spawn import run_ranks

_TIMEOUT = 60.0  # seconds
_SMALL_CALLS, _LARGE_CALLS = 200, 7
_LARGE = 2**24  # bytes


def measure_link() -> Link | None:
    """Link that two ranks find on this node; None if they cannot talk."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "link.json"
        if run_ranks(2, ["-P", "-m", __name__, str(out)]) is not None or not out.exists():
            return None
        small, large = json.loads(out.read_text())
    delay = small / 2  # there and back
    return Link(delay, _LARGE / max(large - small - delay, 1e-6))


def work(transport: Transport, out: Path) -> None:
    """Time calls on this rank; rank 0 writes the seconds of a small one, and of a large and a small one."""
    value, payload = np.zeros(1), np.zeros(_LARGE, np.uint8)

    def both() -> None:
        transport.broadcast(payload)
        transport.maximum(value)

    both()  # connects
    small = statistics.median(_seconds(lambda: transport.maximum(value)) for _ in range(_SMALL_CALLS))
    large = statistics.median(_seconds(both) for _ in range(_LARGE_CALLS))
    if transport.rank == 0:
        out.write_text(json.dumps([small, large]))


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    opened = open_transport("torch", detect(os.environ), _TIMEOUT)
    work(opened, Path(sys.argv[1]))
    exit_process(opened, 0)
