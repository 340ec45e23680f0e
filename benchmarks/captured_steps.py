"""What a step that is captured takes of the host: microseconds, beside those of a loop that a user writes by hand.

    python benchmarks/captured_steps.py [--repeats 5]

On a CPU, where a launch does nothing: what remains is what the host does for a GPU, which computes meanwhile. A host
that takes longer for a step than the GPU takes for its kernels leaves the GPU idle. Medians of runs in turns; FedAvg
with `mlp`, whose samples are small.
"""

import argparse
import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from pflmpi.learning import cuda_graphs, sgd
from pflmpi.learning.task import Task
from pflmpi.runtime.executors.batches import ClientBatches
from pflmpi.testing import quick_run

BATCH = 8
TRAINING = {"rounds": 3, "epochs": 4, "batch_size": BATCH, "lr_decay": 0.99, "participation": 1.0, "drop_last": True}


class AsOnAGpu:
    """A task whose steps are captured in a loop too."""

    def __init__(self, task: Task) -> None:
        self.architecture, self.frozen, self.device, self.batched = task.architecture, task.frozen, task.device, True


@contextmanager
def launches() -> Iterator[list[float]]:
    """When each launch came that does nothing."""
    times: list[float] = []

    def capture(work: Callable[[], object]) -> Callable[[], object]:
        waiting = [work]  # the first launch is compared with the plain step

        def launch() -> None:
            times.append(time.perf_counter())
            if waiting:
                waiting.pop()()

        return launch

    steps, as_on_a_gpu = sgd._make_steps, functools.cache(AsOnAGpu)
    with (
        mock.patch.dict(cuda_graphs.BY_DEVICE, cpu=capture),
        mock.patch.object(sgd, "_make_steps", lambda task, *rest: steps(as_on_a_gpu(task), *rest)),  # type: ignore[arg-type]
        mock.patch.object(ClientBatches, "_count_together", lambda self: 100),  # as many batches at once as on a GPU
    ):
        yield times


def of_a_run(executor: str) -> float:
    """Microseconds from launch to launch."""
    raw = quick_run.settings(training=TRAINING, algorithm={"name": "fedavg"})
    raw["runtime"] = {"device": "cpu", "executor": executor}
    with launches() as times, tempfile.TemporaryDirectory() as folder:
        quick_run.run(raw, Path(folder) / "run")
    return _median(times)


def by_hand() -> float:
    """The same of a loop over the batches of a client: choose them, copy them where the graph reads them, launch."""
    images, labels = torch.rand(400, 1, 8, 8), torch.randint(0, 10, (400,))
    x, y, times = torch.empty(BATCH, 1, 8, 8), torch.empty(BATCH, dtype=torch.int64), list[float]()
    for _ in range(20):
        order: list[Tensor] = list(torch.split(torch.randperm(400), BATCH))
        for chosen in order:
            x.copy_(images[chosen])
            y.copy_(labels[chosen])
            times.append(time.perf_counter())
    return _median(times)


def _median(times: list[float]) -> float:
    return 1e6 * statistics.median(later - earlier for earlier, later in itertools.pairwise(times))


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    ways: dict[str, Callable[[], float]] = {
        "one client after another": functools.partial(of_a_run, "loop"),
        "7 clients in lanes": functools.partial(of_a_run, "lanes"),
        "a loop by hand": by_hand,
    }
    measured: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, measure in ways.items():
            measured[name].append(measure())
    print("| microseconds of the host for a step | median | all |\n|---|---|---|")
    for name, values in measured.items():
        print(f"| {name} | {statistics.median(values):.0f} |", ", ".join(f"{value:.0f}" for value in values), "|")


if __name__ == "__main__":
    main()
