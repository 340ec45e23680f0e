"""A transport that keeps a copy of every payload that leaves a rank for another."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from pflmpi.transports.base import Transport


@dataclass(frozen=True)
class Payload:
    """One payload from one rank to another; what a reduction sends is counted as sent to rank 0.

    `answers`: it is on the way to clients, also where rank 0 receives it.
    """

    operation: str
    channel: str
    sender: int
    receiver: int
    content: bytes
    answers: bool = False


class Recorder(Transport):
    """Passes everything on to another transport, and records on each rank what that rank sends."""

    name = "inprocess"

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner.rank, inner.size, inner.timeout)
        self._inner = inner
        self._now = "control"
        self._answers = False
        self.sent: list[Payload] = []

    @contextmanager
    def channel(self, name: str) -> Iterator[None]:  # type: ignore[override]
        before, self._now = self._now, name
        with super().channel(name):  # type: ignore[arg-type]
            yield
        self._now = before

    def all_to_all(self, parts: Any, sizes: Any, moved: int, answers: bool = False) -> dict[int, np.ndarray]:
        self._answers = answers
        received = super().all_to_all(parts, sizes, moved, answers)
        self._answers = False
        return received

    def _record(self, operation: str, receiver: int, content: np.ndarray) -> None:
        self.sent.append(Payload(operation, self._now, self.rank, receiver, content.tobytes(), self._answers))

    def _broadcast(self, buffer: np.ndarray) -> None:
        for rank in range(1, self.size) if self.rank == 0 else ():
            self._record("broadcast", rank, buffer)
        self._inner._broadcast(buffer)

    def _exchange(self, operation: str, sent: dict[int, np.ndarray], received: dict[int, np.ndarray]) -> None:
        for rank, part in sent.items():
            self._record(operation, rank, part)
        self._inner._exchange(operation, sent, received)

    def _maximum(self, keys: np.ndarray) -> None:
        if self.rank != 0:
            self._record("maximum", 0, keys)
        self._inner._maximum(keys)

    def _sum(self, values: np.ndarray) -> None:
        if self.rank != 0:
            self._record("sum", 0, values)
        self._inner._sum(values)

    def _barrier(self) -> None:
        self._inner._barrier()

    def abort(self, code: int) -> NoReturn:
        self._inner.abort(code)

    def _close(self) -> None:
        self._inner._close()
