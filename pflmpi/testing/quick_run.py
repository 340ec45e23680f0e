"""Runs whole experiments in this process, with threads as ranks; takes milliseconds."""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch

from pflmpi.config import load as configuration
from pflmpi.errors import TransportError
from pflmpi.experiment import run as experiment
from pflmpi.experiment.run import RankContext
from pflmpi.experiment.stored_config import stored_config
from pflmpi.runtime.faults import CollectiveError
from pflmpi.store import run_folder
from pflmpi.transports.base import Buffer, Transport

QUICK: dict[str, Any] = {
    "seed": 3,
    "data": {"name": "digits", "limit": 400},
    "partition": {"name": "exdir", "clients": 7, "classes_per_client": 3, "alpha": 0.7, "min_samples": 4},
    "model": {"name": "mlp", "hidden": 12},
    "algorithm": {"name": "fedgmh"},
    "training": {"rounds": 3, "participation": 0.4, "epochs": 1, "batch_size": 10, "lr": 0.1},
    "runtime": {"device": "cpu"},
}


def settings(base: Mapping[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    """Returns `QUICK` with sections replaced, or merged if they are mappings without a name.

    Args:
        base: sections to put in first.
        sections: sections to put in last.
    """
    result = dict(QUICK)
    for changes in (base or {}, sections):
        for name, value in changes.items():
            merge = isinstance(value, dict) and "name" not in value
            result[name] = {**result.get(name, {}), **value} if merge else value
    return result


def _make_context(transport: Transport) -> RankContext:
    return RankContext(transport, torch.device("cpu"), 2)


def run(raw: dict[str, Any], folder: Path, ranks: int = 1) -> str:
    """Runs an experiment and returns the digest of its last round."""
    torch.set_num_threads(1)
    config = configuration.parse(raw)
    _run_on(ranks, lambda transport: experiment.run(config, folder, _make_context(transport), lambda progress: None))
    return digest(folder)


def resume(folder: Path, overrides: tuple[str, ...] = (), ranks: int = 1, changed_code: bool = False) -> str:
    """Resumes a run and returns the digest of its last round."""
    config = stored_config(folder, overrides)
    go = partial(experiment.run, resume="always", changed_code=changed_code)
    _run_on(ranks, lambda transport: go(config, folder, _make_context(transport), lambda progress: None))
    return digest(folder)


def digest(folder: Path) -> str:
    return run_folder.digest(folder, run_folder.rounds(folder)[-1])


def _run_on(ranks: int, function: Any) -> None:
    try:
        run_ranks(ranks, function)
    except CollectiveError as agreed:
        raise agreed.error from agreed


T = TypeVar("T")


class RankGone(TransportError):
    """Raised on a rank that waits for one whose function has ended."""


class Group:
    """State that the ranks of one `run_ranks` share."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout
        self.changed = threading.Condition()
        self.calls: dict[int, dict[int, tuple[str, np.ndarray]]] = defaultdict(dict)  # by number of the call, by rank
        self.mail: dict[tuple[int, int], deque[np.ndarray]] = defaultdict(deque)  # by sender and receiver
        self.gone: set[int] = set()

    def leave(self, rank: int) -> None:
        with self.changed:
            self.gone.add(rank)
            self.changed.notify_all()

    def wait(self, ready: Callable[[], bool], lost: Callable[[], set[int]], operation: str) -> None:
        """Waits, holding `changed`, until ready; raises if a rank that is needed has gone, or at a timeout."""
        in_time = self.changed.wait_for(lambda: ready() or lost(), self.timeout)
        if ready():
            return
        if in_time:
            raise RankGone(f"a rank ended or was lost during {operation} (ranks {sorted(lost())})")
        raise TransportError(f"{operation} did not end within {self.timeout} s")

    def exchange(self, rank: int, number: int, operation: str, value: np.ndarray) -> list[np.ndarray]:
        """Returns copies of all ranks' values in a collective call."""
        with self.changed:
            self.calls.pop(number - 2, None)  # a rank in call `number - 1` has left it
            call = self.calls[number]
            call[rank] = operation, value.copy()
            self.changed.notify_all()
            self.wait(lambda: len(call) == self.size, lambda: self.gone - call.keys(), operation)
            operations = [call[other][0] for other in range(self.size)]
            assert len(set(operations)) == 1, f"ranks make different calls: {operations}"
            return [call[other][1].copy() for other in range(self.size)]


class ThreadTransport(Transport):
    """One thread of `run_ranks`."""

    name = "inprocess"

    def __init__(self, rank: int, group: Group) -> None:
        super().__init__(rank, group.size, group.timeout)
        self._group = group
        self._calls = 0

    def abort(self, code: int) -> NoReturn:
        raise SystemExit(code)

    def _collective(self, operation: str, value: np.ndarray) -> list[np.ndarray]:
        self._calls += 1
        return self._group.exchange(self.rank, self._calls, operation, value)

    def _broadcast(self, buffer: Buffer) -> None:
        assert isinstance(buffer, np.ndarray), "threads share no GPU"
        buffers = self._collective("broadcast", buffer)
        sizes = [len(buffer) for buffer in buffers]
        assert len(set(sizes)) == 1, f"broadcast of unlike sizes: {sizes}"
        if self.rank != 0:
            buffer[:] = buffers[0]

    def _barrier(self) -> None:
        self._collective("barrier", np.zeros(0))

    def _exchange(self, sent: dict[int, Buffer], received: dict[int, Buffer]) -> None:
        with self._group.changed:
            for rank, part in sent.items():
                assert isinstance(part, np.ndarray), "threads share no GPU"
                self._group.mail[self.rank, rank].append(part.copy())
            self._group.changed.notify_all()
        for rank, part in received.items():
            content = self._take(rank)
            assert isinstance(part, np.ndarray), "threads share no GPU"
            assert len(content) == len(part), f"rank {rank} sent {len(content)} bytes, {len(part)} were declared"
            part[:] = content

    def _take(self, sender: int) -> np.ndarray:
        box = self._group.mail[sender, self.rank]
        with self._group.changed:
            self._group.wait(lambda: bool(box), lambda: self._group.gone & {sender}, "exchange")
            return box.popleft()

    def _close(self) -> None:
        self.barrier()


def run_ranks(size: int, function: Callable[[ThreadTransport], T], timeout: float = 60.0) -> list[T]:
    """Runs the function on `size` ranks and returns the result of each.

    If it raises on a rank, ranks that wait for that one stop, and its error is raised here (that of the lowest rank if
    several raise).
    """
    group = Group(size, timeout)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def work(rank: int) -> None:
        try:
            results[rank] = function(ThreadTransport(rank, group))
        except BaseException as error:
            errors[rank] = error
        finally:
            group.leave(rank)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise min(errors.items(), key=lambda item: (isinstance(item[1], RankGone), item[0]))[1]
    return [results[rank] for rank in range(size)]
