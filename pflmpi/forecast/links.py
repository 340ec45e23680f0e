"""The link between two ranks of one node: measured by two ranks, and the worker that they run."""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pflmpi.forecast.communication import Link
from pflmpi.forecast.stopwatch import resident, shared
from pflmpi.transports.base import Transport
from pflmpi.transports.spawn import run_ranks

_SMALL_CALLS, _LARGE_CALLS = 200, 7
_LARGE = 2**24  # bytes


@dataclass(frozen=True)
class Measured:
    """What two ranks of one node have found.

    Attributes:
        link: between them.
        base: bytes of a rank that has done nothing yet.
        shared: bytes of it that the ranks of a node share.
    """

    link: Link
    base: int
    shared: int


def measure_link(worker: str) -> Measured | None:
    """Start two ranks on this node and return what they find; None if they cannot talk.

    Args:
        worker: the module that calls `work` on each rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "link.json"
        if run_ranks(2, ["-m", worker, str(out)]) is not None or not out.exists():
            return None
        found = json.loads(out.read_text())
    return Measured(_link(found["small"], found["large"]), found["base"], found["shared"])


def work(transport: Transport, out: Path) -> None:
    """Time calls on this rank; rank 0 writes the seconds of a small and a large one."""
    base, files = resident(), shared()
    values, payload = np.zeros(1), np.zeros(_LARGE, np.uint8)

    def both() -> None:
        transport.broadcast(payload)
        transport.maximum(values)

    small = _median(lambda: transport.maximum(values), _SMALL_CALLS)
    large = _median(both, _LARGE_CALLS)
    if transport.rank == 0:
        out.write_text(json.dumps({"small": small, "large": large, "base": base, "shared": files}))


def _median(call: Callable[[], object], times: int) -> float:
    call()
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _link(small: float, large: float) -> Link:
    """Link with which two ranks take the measured seconds for a maximum of one value, and for a broadcast and that."""
    delay = small / 2  # there and back
    return Link(delay, _LARGE / max(large - small - delay, 1e-6))
