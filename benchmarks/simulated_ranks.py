"""A thousand ranks in one process: what a round costs a rank besides computing, and the bytes that travel.

    python benchmarks/simulated_ranks.py [--ranks 1000] [--rounds 3] [--cases fedavg:mlp fedgmh:cnn fedamp:mlp]

Every rank is a thread with the real schedule, messages, state, checkpoints and loop of a run: one client each, 20 take
part in a round. Clients are not computed: what they send is zeros. Seconds are the processor's in the thread of a rank,
without what this file does in place of a network and without the thread that writes. "Plan" is what each rank computes
at the start. Memory decides the model: each rank holds what it would hold alone; it is the most so far.
"""

import argparse
import gc
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from scale import data

from pflmpi import tree
from pflmpi.config import load as configuration
from pflmpi.experiment.build import Experiment, prepare, setup
from pflmpi.experiment.stored_config import attributes, recorded
from pflmpi.learning.task import HOST
from pflmpi.messages.kinds import ClassMeans, Messages, with_rows
from pflmpi.runtime import rounds
from pflmpi.runtime.checkpoints import Checkpoints
from pflmpi.runtime.client_state import allocate, initialise
from pflmpi.runtime.counts import Counts
from pflmpi.runtime.executors.base import Loop
from pflmpi.runtime.executors.transfers import Update
from pflmpi.runtime.progress import Progress
from pflmpi.runtime.round_report import RoundHooks
from pflmpi.runtime.round_schedule import schedule
from pflmpi.runtime.setup import Setup
from pflmpi.runtime.stopping import Stop
from pflmpi.store import metrics_file
from pflmpi.store.layout import Layout
from pflmpi.store.run_lock import take
from pflmpi.text import format_bytes
from pflmpi.transports.base import Transport
from pflmpi.transports.inprocess import InProcessTransport

HEAD = (
    "| algorithm, model | up, down: as papers count | on the wire, to and from rank 0 | a rank, ms a round (largest) "
    "| rank 0, ms | plan, s | memory of all, GiB |\n|" + "---|" * 7
)


class Meeting:
    """A collective call of all threads: each gives a value, the last one computes the result for all."""

    def __init__(self, ranks: int) -> None:
        self.changed, self.ranks, self.number = threading.Condition(), ranks, 0
        self.values: dict[int, Any] = {}
        self.result: Any = None

    def all(self, rank: int, value: object, combine: Callable[[dict[int, Any]], object]) -> Any:
        """Returns what `combine` makes of the values by rank."""
        with self.changed:
            number = self.number
            self.values[rank] = value
            if len(self.values) == self.ranks:
                self.result, self.values = combine(self.values), {}
                self.number += 1
                self.changed.notify_all()
            else:
                self.changed.wait_for(lambda: self.number > number)
            return self.result


class Threads(Transport):
    """A rank as a thread; `seconds` are the processor's in place of a network."""

    name = "inprocess"

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, meeting.ranks, 600.0)
        self._meeting, self.seconds = meeting, 0.0

    def abort(self, code: int) -> NoReturn:
        """End this thread."""
        raise SystemExit(code)

    def _meet(self, value: object, combine: Callable[[dict[int, Any]], object]) -> Any:
        began = time.thread_time()
        result = self._meeting.all(self.rank, value, combine)
        self.seconds += time.thread_time() - began
        return result

    def _broadcast(self, buffer: np.ndarray) -> None:
        sent = self._meet(buffer, lambda values: values[0])
        if self.rank:
            buffer[:] = sent
        self._barrier()

    def _exchange(self, sent: dict[int, np.ndarray], received: dict[int, np.ndarray]) -> None:
        box = self._meet(sent, dict)
        for rank, part in received.items():
            part[:] = box[rank][self.rank]
        self._barrier()

    def _barrier(self) -> None:
        self._meet(None, lambda values: None)

    def _close(self) -> None:
        pass


class Idle(Loop):
    """Computes nothing: states stay, messages are zeros."""

    def local_update(self, method: Any, clients: np.ndarray, states: Any, down: Messages, round: int) -> Any:
        return lambda: Update(states, self._zeros(clients), torch.zeros(len(clients), dtype=torch.float64), True)

    def introduce(self, clients: np.ndarray, states: Any) -> Messages:
        return self._zeros(clients)

    def evaluate(self, clients: np.ndarray, states: Any, down: Messages, round: int) -> Any:
        return lambda: Counts.none(self.federation.test_class_counts[clients])

    def _zeros(self, clients: np.ndarray) -> Messages:
        task, messages = self.tasks[0], {}
        for name, kind in self.algorithm.uplink(task).items():
            if getattr(kind, "kept", False):  # in the states
                continue
            like = kind.like if not isinstance(kind, ClassMeans) else _means(kind, task.num_classes)
            messages[name] = tree.map(
                lambda leaf: torch.zeros(leaf.shape, dtype=leaf.dtype), with_rows(like, len(clients))
            )
        return messages


def _means(kind: ClassMeans, classes: int) -> Any:
    means = {"means": torch.empty(classes, kind.num_features, device="meta")}
    counts = {"counts": torch.empty(classes, dtype=torch.int32, device="meta")}
    return {**means, **counts} if kind.counts else means


def main() -> None:
    """Simulate the cases one after another, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", default=["fedavg:mlp", "fedgmh:cnn", "fedamp:mlp"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    threading.stack_size(1 << 20)
    gc.disable()  # one collection would go over the objects of all ranks
    print(HEAD)
    for case in options.cases:
        with tempfile.TemporaryDirectory() as folder:
            simulate(*case.split(":"), options.ranks, options.rounds, Path(folder))


def simulate(algorithm: str, model: str, ranks: int, count: int, folder: Path) -> None:
    """Print a line of the table."""
    raw = {
        "data": {"path": str(data(ranks - 1, (1, 28, 28), folder))},
        "partition": {"name": "writers"},
        "model": {"name": model, **({"hidden": 100} if model == "mlp" else {})},
        "algorithm": {"name": algorithm},
        "training": {"rounds": count, "participation": 20 / (ranks - 1)},
        "runtime": {"device": "cpu", "executor": "loop"},
    }
    config = configuration.parse(raw)
    experiment = prepare(config, HOST)
    began = time.process_time()
    ready = setup(experiment, ranks, ranks)
    planned = time.process_time() - began
    executor = Idle(**{name: getattr(ready.executor, name) for name in ready.executor.__dataclass_fields__})
    ready = replace(ready, executor=executor)
    seconds, progress = run(experiment, ready, ranks, folder / "run")
    moved = [np.mean([one.bytes[way].sum() for one in progress[1:]]) for way in ("up", "down", "wire_up", "wire_down")]
    each = [1e3 * (one[-1] - one[0]) / (count - 1) for one in seconds]
    cells = [
        f"{algorithm}, `{model}`, {format_bytes(tree.num_bytes(experiment.tasks[0].like()))}",
        ", ".join(map(format_bytes, moved[:2])),
        ", ".join(map(format_bytes, moved[2:])),
        f"{statistics.median(each[1:]):.1f} ({max(each[1:]):.1f})",
        f"{each[0]:.0f}",
        f"{planned:.2f}",
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f}",
    ]
    print(f"| {' | '.join(cells)} |", flush=True)


def run(experiment: Experiment, ready: Setup, ranks: int, folder: Path) -> tuple[list[list[float]], list[Progress]]:
    """For each rank the processor's seconds after each round, without the network's; what rank 0 saw."""
    meeting, seconds, progress = Meeting(ranks), [list[float]() for _ in range(ranks)], list[Progress]()
    lock = take(folder, {}, False)
    (folder / "shards").mkdir()
    metrics_file.restart(folder, 0)
    described = attributes(experiment, recorded(experiment, InProcessTransport(), "0" * 16, experiment.code))

    class Noting(Stop):
        def __init__(self, transport: Threads) -> None:
            super().__init__()
            self._rank = transport

        def agree(self, transport: Any, *more: Any) -> Any:
            seconds[transport.rank].append(time.thread_time() - transport.seconds)
            return super().agree(transport, *more)

    def rank(number: int) -> None:
        transport = Threads(number, meeting)
        population = allocate(experiment.cohort, ready.placement.hosted(number), ready.templates)
        initialise(population, ready.algorithm, experiment.tasks)
        server = ready.algorithm.init_server(ready.task) if number == 0 else {}
        layout = Layout.unwritten(experiment.cohort)
        config = experiment.config
        checkpoints = Checkpoints(folder, ready, transport, described, layout, lock, config.checkpoint.keep)
        hooks = RoundHooks(ready, transport, checkpoints, progress.append, Noting(transport))
        scheduled = schedule(ready, config.evaluation, config.checkpoint, None)
        rounds.run(ready, transport, scheduled, hooks, checkpoints, server, population, skips=False)

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lock.release()
    return seconds, progress


if __name__ == "__main__":
    main()
