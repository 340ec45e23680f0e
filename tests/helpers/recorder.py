"""A transport that keeps a copy of every payload that leaves a rank for another."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from pflmpi.transports.base import Transport


@dataclass(frozen=True)
class Payload:
    """One payload from one rank to another; `down`: on the way to clients, not from them.

    Attributes:
        purpose: "message" of the algorithm, else "agreement" for a maximum, else "control".
    """

    purpose: str
    sender: int
    receiver: int
    content: bytes
    down: bool


class Recorder(Transport):
    """Passes everything on to another transport, and records on each rank what that rank sends."""

    name = "inprocess"

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner.rank, inner.size, inner.timeout)
        self._inner = inner
        self._now = "control"
        self._down = False
        self.sent: list[Payload] = []

    @contextmanager
    def counting(self) -> Iterator[None]:
        self._now = "message"
        with super().counting():
            yield
        self._now = "control"

    def exchange(self, parts: Any, sizes: Any, moved: int, down: bool = False, **more: Any) -> dict[int, Any]:
        self._down = down
        return super().exchange(parts, sizes, moved, down, **more)

    def maximum(self, values: np.ndarray) -> np.ndarray:
        before = self._now
        self._now = "agreement" if before == "control" else before
        result = super().maximum(values)
        self._now = before
        return result

    def _record(self, receiver: int, content: np.ndarray, down: bool) -> None:
        self.sent.append(Payload(self._now, self.rank, receiver, content.tobytes(), down))

    def _broadcast(self, buffer: np.ndarray) -> None:
        for rank in range(1, self.size) if self.rank == 0 else ():
            self._record(rank, buffer, down=True)
        self._inner._broadcast(buffer)

    def _exchange(self, sent: dict[int, np.ndarray], received: dict[int, np.ndarray]) -> None:
        for rank, part in sent.items():
            self._record(rank, part, self._down)
        self._inner._exchange(sent, received)

    def _barrier(self) -> None:
        self._inner._barrier()

    def abort(self, code: int) -> NoReturn:
        self._inner.abort(code)

    def _close(self) -> None:
        self._inner._close()
