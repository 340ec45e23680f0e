"""What a GPU shows: the promises, and seconds per round of published workloads against a bare loop.

    python benchmarks/gpu.py [--only NAME ...] [--rounds N] [--device cuda]       NAME: promises, or a workload
    launch/gpu-check                    these and more in minutes, each with a time limit; see benchmarks/gpu_check.py

Promises: FedGMH on digits, with one digest for 1, 2 and 4 ranks that share the GPU, client by client and in lanes, and
for a run that was stopped and continued.

Workloads: clients, samples, epochs and models as their sources say, on random images (seconds do not depend on them),
one rank; all samples of a client train, and a test set of its own is tested. Floors: the same SGD steps in a loop over
one network, with the samples on the device and nothing else, by torch.autograd.grad, eager and with the step in a CUDA
graph. Ratio = product / graphed floor, of the medians of interleaved repetitions. Busy: the share of time with a kernel
on the GPU while the product runs, its start included, as nvidia-smi samples it.

On a machine without a GPU, `--device cpu --tiny` shows that all of this runs.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import yaml
from torch.nn import functional as F

from pflmpi import tree
from pflmpi.config import load as configuration
from pflmpi.data import dataset
from pflmpi.data.federation import build
from pflmpi.experiment import run as experiment_run
from pflmpi.experiment.build import Experiment, prepare
from pflmpi.experiment.run import RankContext
from pflmpi.learning.participation import Participation
from pflmpi.learning.task import Task
from pflmpi.runtime.config import RuntimeConfig
from pflmpi.runtime.devices import choose_device, fix_kernels
from pflmpi.runtime.progress import Progress
from pflmpi.transports.inprocess import InProcessTransport

CIFAR, FEMNIST = (3, 32, 32), (1, 28, 28)
REPEATS = 3


@dataclass(frozen=True)
class Workload:
    """A published workload: clients, training samples of each, participants of a round, batch size, epochs."""

    source: str
    shape: tuple[int, int, int]
    classes: int
    model: dict[str, object]
    clients: int
    samples: int
    participants: int
    batch: int
    epochs: int = 1
    rounds: int = 20


WORKLOADS = {
    "cifar10-1000": Workload(
        "pfl-research's CIFAR-10 benchmark, which has 1,500 rounds",
        CIFAR,
        10,
        {"name": "dropout_cnn"},
        clients=1000,
        samples=50,
        participants=50,
        batch=10,
    ),
    "femnist-3400": Workload(
        "FLUTE's FEMNIST experiment",
        FEMNIST,
        62,
        {"name": "dropout_cnn"},
        clients=3400,
        samples=197,
        participants=10,
        batch=20,
    ),
    "cifar10-100-lenet": Workload(
        "BlazeFL's CIFAR-10 benchmark",
        CIFAR,
        10,
        {"name": "lenet"},
        clients=100,
        samples=500,
        participants=100,
        batch=50,
        epochs=5,
        rounds=3,
    ),
    "cifar10-100-resnet18": Workload(
        "BlazeFL's CIFAR-10 benchmark, torchvision's network with its 7x7 stem; 10 of its 100 a round",
        CIFAR,
        10,
        {"name": "resnet18", "stem": "imagenet"},
        clients=100,
        samples=500,
        participants=10,
        batch=50,
        epochs=5,
        rounds=2,
    ),
}


def main() -> None:
    """Print the device, the promises and the workloads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["promises", *WORKLOADS]
    parser.add_argument("--only", nargs="*", metavar="NAME", default=names, help=f"of {', '.join(names)}")
    parser.add_argument("--rounds", type=int, help="rounds of each workload")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="few clients, one round: only to see that it runs")
    options = parser.parse_args()
    if unknown := set(options.only) - set(names):
        parser.error(f"--only {' '.join(sorted(unknown))}: known are {', '.join(names)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; `nvidia-smi` and `pflmpi doctor` say more")
    print(f"device: {described(options.device)}; torch {torch.__version__}")
    if "promises" in options.only:
        promises(options.device, *((["loop"], [1, 2]) if options.tiny else (["loop", "lanes"], [1, 2, 4])))
    device = choose_device(RuntimeConfig(device=options.device))
    for name, workload in WORKLOADS.items():
        if name not in options.only:
            continue
        if options.tiny:
            workload = replace(workload, clients=4, samples=40, participants=2, rounds=1)
        measure(name, replace(workload, rounds=options.rounds or workload.rounds), device)


def described(device: str) -> str:
    """The device, its memory and its driver."""
    if device == "cpu":
        return "CPU"
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    description = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return description or torch.cuda.get_device_name()


def promises(device: str, executors: Sequence[str], ranks: Sequence[int]) -> None:
    """Print for each promise whether it holds."""
    with tempfile.TemporaryDirectory() as folder:
        for executor in executors:
            digests = {number: run(Path(folder), device, executor, number) for number in ranks}
            answer = "yes" if len(set(digests.values())) == 1 else f"NO, {digests}"
            print(f"{executor}: same bits on {', '.join(map(str, ranks))} ranks: {answer}", flush=True)
            resumed = run(Path(folder), device, executor, 1, stop_after=2)
            print(f"{executor}: same bits after a continuation: {'yes' if resumed == digests[1] else 'NO'}", flush=True)


def run(folder: Path, device: str, executor: str, ranks: int, stop_after: int | None = None) -> str:
    """The digest of a run by the command line, or of one that is continued on another number of ranks."""
    out = folder / f"{executor}-{ranks}-{stop_after}"
    config = {
        "data": {"name": "digits"},
        "partition": {"name": "exdir", "clients": 20, "classes_per_client": 3, "alpha": 1.0},
        "model": {"name": "cnn", "kernel": 3, "padding": 1, "hidden": 64},
        "algorithm": {"name": "fedgmh"},
        "training": {"rounds": 4, "participation": 0.5, "lr": 0.05},
        "runtime": {"device": device, "executor": executor, "lanes": 4, "server": "shared"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    pflmpi = [sys.executable, "-m", "pflmpi"]
    words = ["run", str(folder / "config.yaml"), "--out", str(out), "--ranks", str(ranks), "--quiet"]
    call([*pflmpi, *words, *(["-s", f"training.rounds={stop_after}"] if stop_after else [])])
    if stop_after:
        call([*pflmpi, "resume", str(out), "-s", "training.rounds=4", "--ranks", "2", "--quiet"])
    return call([*pflmpi, "inspect", str(out), "--digest"]).strip()


def call(command: list[str]) -> str:
    """What a command prints; its errors are shown."""
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def measure(name: str, workload: Workload, device: torch.device) -> None:
    """Print seconds per round of the product and of the floors."""
    product, eager, graphed, busy_share, experiment = timed(workload, device)
    print(
        f"{name}: {product:.3f} s a round, floor {eager:.3f} s, graphed {graphed:.3f} s, "
        f"ratio {product / graphed:.2f}, busy {busy_share}; "
        f"{experiment.config.runtime.executor}, {experiment.config.runtime.lanes} lanes; after {workload.source}",
        flush=True,
    )


def timed(workload: Workload, device: torch.device) -> tuple[float, float, float, str, Experiment]:
    """Median seconds per round of the product, of the eager and of the graphed floor, and the GPU's busy share."""
    experiment = prepared(workload, device)
    context = RankContext(InProcessTransport(), device, 1, ("GPU",) if device.type == "cuda" else ())
    rounds, shares = list[float](), list[float]()
    floors: dict[bool, list[float]] = {graphed: [bare(experiment, workload, graphed)] for graphed in (False, True)}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(REPEATS):
            progress: list[Progress] = []
            with busy(device) as samples:
                run_folder, federation = Path(folder) / str(repeat), experiment.division.everyone
                experiment_run.run(experiment.config, run_folder, context, progress.append, federation=federation)
            shares += samples
            counted = progress[1:-1] or progress[1:] or progress  # the first round warms up, the last one tests
            rounds += [round.seconds["round"] for round in counted]
            for graphed, seconds in floors.items():
                seconds.append(bare(experiment, workload, graphed))
    eager, graphed_floor = (statistics.median(seconds[1:]) for seconds in floors.values())  # the first warms up
    busy_share = f"{statistics.mean(shares):.0f} %" if shares else "unknown"
    return statistics.median(rounds), eager, graphed_floor, busy_share, experiment


def prepared(workload: Workload, device: torch.device, algorithm: str = "fedavg", **training: object) -> Experiment:
    """The experiment of a workload, on random images, of which one in ten is for tests."""
    config = configuration.parse(
        {
            "data": {"name": "cifar10", "split": "official"},
            "partition": {"name": "iid", "clients": workload.clients},
            "model": workload.model,
            "algorithm": {"name": algorithm},
            "training": {
                "rounds": workload.rounds,
                "participation": workload.participants / workload.clients,
                "batch_size": workload.batch,
                "epochs": workload.epochs,
                "lr": 0.01,
                **training,
            },
            "evaluation": {"every": 10**6},
            "checkpoint": {"every": 10**6},
            "runtime": {"device": device.type},
        }
    )
    n = workload.clients * workload.samples
    total = n + max(n // 10, workload.clients)
    images = np.random.default_rng(0).integers(0, 256, (total, *workload.shape), np.uint8)
    labels, is_test = np.arange(total) % workload.classes, np.arange(total) >= n
    data = dataset.assemble("random", images, labels, is_test, workload.classes, digest="0")
    fix_kernels(device, config.runtime, config.training)
    models = ("GPU",) if device.type == "cuda" else ()
    return prepare(config, device, models, build(data, config.partition, config.data, 0))


def bare(experiment: Experiment, workload: Workload, graphed: bool) -> float:
    """Seconds of a round's steps and nothing else: client after client, one network, the samples on the device.

    Args:
        graphed: launch the step as a CUDA graph, on one network and one batch, as a user would; on a CPU it is eager.
    """
    task, training = experiment.tasks[0], experiment.config.training
    data, batch = experiment.federation.dataset, workload.batch
    places = np.arange(10 * batch) % len(data.labels)
    images, labels = (torch.from_numpy(values[places]).to(task.device) for values in (data.images, data.labels))
    chosen = Participation(training, 0, np.ones(workload.clients)).participants(1)
    steps = sum(training.num_steps(int(experiment.federation.num_train[client])) for client in chosen)
    model = tree.to(task.init(), task.device)
    key = torch.zeros((), dtype=torch.int64, device=task.device)  # of dropout, where the network has any
    leaves = [leaf.requires_grad_() for path, leaf in tree.leaves(model) if not path.startswith("stats")]
    noisy = {**model, "noise": {"key": key}} if task.architecture.draws_noise else model
    own_images, own_labels = images[:batch].clone(), labels[:batch].clone()

    def step() -> None:
        x = task.prepare(own_images)
        gradients = torch.autograd.grad(F.cross_entropy(task.predict(noisy, x, training=True), own_labels), leaves)
        with torch.no_grad():
            torch._foreach_add_(leaves, gradients, alpha=-training.lr)

    launch = captured(step) if graphed and task.device.type == "cuda" else step
    synchronise(task)
    began = time.perf_counter()
    for number in range(steps):
        first = number % 10 * batch
        own_images.copy_(images[first : first + batch])
        own_labels.copy_(labels[first : first + batch])
        launch()
    synchronise(task)
    return time.perf_counter() - began


def side_by_side(experiment: Experiment, workload: Workload, together: int, steps: int) -> tuple[float, torch.Tensor]:
    """Seconds of a step where some clients' steps are one CUDA graph, a stream for each client; the weights at its end.

    Args:
        together: clients in a graph.
        steps: of each client in it: 1, or those of a pass.
    """
    task, lr, batch = experiment.tasks[0], experiment.config.training.lr, workload.batch
    labels = torch.from_numpy(experiment.federation.dataset.labels[: steps * batch]).to(task.device).split(batch)
    images = torch.from_numpy(experiment.federation.dataset.images[: steps * batch]).to(task.device).split(batch)
    key = torch.zeros((), dtype=torch.int64, device=task.device)
    models = [tree.clone(tree.to(task.init(), task.device)) for _ in range(together)]
    streams = [torch.cuda.Stream() if task.device.type == "cuda" else None for _ in models]

    def a_pass(model: tree.Tree) -> None:
        leaves = [leaf.requires_grad_() for path, leaf in tree.leaves(model) if not path.startswith("stats")]
        noisy = {**model, "noise": {"key": key}} if task.architecture.draws_noise else model
        for x, y in zip(images, labels, strict=True):
            scores = task.predict(noisy, task.prepare(x), training=True)
            gradients = torch.autograd.grad(F.cross_entropy(scores, y), leaves)
            with torch.no_grad():
                torch._foreach_add_(leaves, gradients, alpha=-lr)

    def work() -> None:
        for model, stream in zip(models, streams, strict=True):
            if stream is None:
                a_pass(model)
                continue
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                a_pass(model)
        for stream in filter(None, streams):
            torch.cuda.current_stream().wait_stream(stream)

    launch = captured(work) if task.device.type == "cuda" else work
    synchronise(task)
    began = time.perf_counter()
    for _ in range(REPEATS):
        launch()
    synchronise(task)
    seconds = (time.perf_counter() - began) / (REPEATS * together * steps)
    return seconds, torch.cat([leaf.detach().reshape(-1).double().cpu() for _, leaf in tree.leaves(models[-1])])


def captured(work: Callable[[], object]) -> Callable[[], object]:
    """The work as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # libraries allocate their workspaces
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def synchronise(task: Task) -> None:
    """Wait for the GPU."""
    if task.device.type == "cuda":
        torch.cuda.synchronize(task.device)


@contextmanager
def busy(device: torch.device) -> Iterator[list[float]]:
    """Samples of the GPU's busy share, in percent, filled when the block ends; none without nvidia-smi."""
    shares: list[float] = []
    if device.type != "cuda" or shutil.which("nvidia-smi") is None:
        yield shares
        return
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sampler:
        yield shares
        sampler.terminate()
        assert sampler.stdout is not None
        shares += [float(line) for line in sampler.stdout if line.strip().isdecimal()]


if __name__ == "__main__":
    main()
