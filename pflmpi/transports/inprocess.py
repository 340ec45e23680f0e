"""The transport of a run in one process: rank 0 has everything already, so nothing moves."""

from typing import NoReturn

import numpy as np

from pflmpi.transports.base import Transport, flush_output

_ALONE = "there is no other rank"


class InProcessTransport(Transport):
    """One rank. The base class answers every call for a single rank; what moves bytes is never reached."""

    name = "inprocess"

    def __init__(self) -> None:
        super().__init__(rank=0, size=1, timeout=0.0)

    def abort(self, code: int) -> NoReturn:
        """End the process with the exit code."""
        flush_output()
        raise SystemExit(code)

    def _broadcast(self, buffer: np.ndarray) -> None:
        raise AssertionError(_ALONE)

    def _send(self, operation: str, parts: dict[int, np.ndarray]) -> None:
        raise AssertionError(_ALONE)

    def _receive(self, operation: str, parts: dict[int, np.ndarray]) -> None:
        raise AssertionError(_ALONE)

    def _maximum(self, keys: np.ndarray) -> None:
        raise AssertionError(_ALONE)

    def _sum(self, values: np.ndarray) -> None:
        raise AssertionError(_ALONE)

    def _barrier(self) -> None:
        raise AssertionError(_ALONE)

    def _close(self) -> None:
        pass
