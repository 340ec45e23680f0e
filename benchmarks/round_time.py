"""Seconds per round against the floor: the same SGD steps and test forwards in a bare PyTorch loop.

    python benchmarks/round_time.py [CASE ...]       on all cores of this machine, one process per core

cnn: 100 clients, participation 0.2, 2 local epochs, batch 100, the 2-conv CNN on 3x32x32 (CIFAR-10's shape), in
fp32 and bf16. The floor is measured in the same processes, right before and after the product's rounds: half of
the round's steps on each of two cores, in the best layout (channels last, pooling before ReLU, one allocation per
leaf), nothing else. Ratio = product / floor.

cnn-10: likewise, 1,000 clients with 50 samples, 50 a round, batch 10, one epoch, nobody tested.

resnet18: likewise, 100 clients with 100 samples, 4 a round, batch 20; the floor is torchvision's module, channels last.

mlp: 20 clients, batch 10, 784-100-10 on 28x28 (Fashion-MNIST's shape); lanes against the bare loop over clients
(nn.Module, torch.optim.SGD, loss.backward()), training alone on both sides. Ratio = bare loop / product.

All data is random bytes: the time does not depend on it. Medians over the repetitions; machines are noisy.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CASES = {
    "cnn": {
        "partition": {"name": "iid", "clients": 100},
        "model": {"name": "cnn"},
        "training": {"participation": 0.2, "epochs": 2, "batch_size": 100, "lr": 0.01},
    },
    "cnn-10": {
        "partition": {"name": "iid", "clients": 1000},
        "model": {"name": "cnn"},
        "training": {"participation": 0.05, "epochs": 1, "batch_size": 10, "lr": 0.01},
        "evaluation": {"every": 1000},
    },
    "resnet18": {
        "partition": {"name": "iid", "clients": 100},
        "model": {"name": "resnet18"},
        "training": {"participation": 0.04, "epochs": 1, "batch_size": 20, "lr": 0.01},
        "evaluation": {"every": 1000},
    },
    "mlp": {
        "partition": {"name": "iid", "clients": 20},
        "model": {"name": "mlp"},
        "training": {"participation": 1.0, "epochs": 1, "batch_size": 10, "lr": 0.01},
        "evaluation": {"every": 1000},
    },
}
# Samples in all; a quarter of each client's are for tests.
SHAPES = {
    "cnn": (60000, 3, 32, 32),
    "cnn-10": (66667, 3, 32, 32),
    "resnet18": (13334, 3, 32, 32),
    "mlp": (20000, 1, 28, 28),
}
REPEATS = 5


def worker(case: str, algorithm: str, precision: str, repeats: int) -> None:
    """Measure on this rank; rank 0 prints."""
    import os

    import numpy as np
    import torch

    from pflmpi.config import load as configuration
    from pflmpi.data.dataset import assemble
    from pflmpi.data.federation import build
    from pflmpi.experiment.build import prepare
    from pflmpi.experiment.run import RankContext, run
    from pflmpi.learning.participation import Participation
    from pflmpi.machine import cores
    from pflmpi.runtime.devices import fix_kernels
    from pflmpi.runtime.progress import Progress
    from pflmpi.transports import open_transport
    from pflmpi.transports.detect import detect

    raw = {
        **CASES[case],
        "data": {"name": "fashion_mnist" if case == "mlp" else "cifar10"},
        "algorithm": {"name": algorithm},
        "checkpoint": {"every": 10**6},
        "runtime": {"device": "cpu"},
    }
    raw["training"] = {**raw["training"], "precision": precision, "rounds": repeats}
    config = configuration.parse(raw)
    cpu = torch.device("cpu")
    fix_kernels(cpu, config.runtime, config.training)
    launch = detect(os.environ)
    transport = open_transport("torch", launch, 600.0)
    rng = np.random.default_rng(0)
    shape = SHAPES[case]
    pixels = rng.integers(0, 256, shape, dtype=np.uint8)
    dataset = assemble("random", pixels, np.arange(shape[0]) % 10, np.zeros(shape[0], bool), 10, digest="0")
    federation = build(dataset, config.partition, config.data, 0)
    place = RankContext(transport, cpu, len(cores()))

    participants = len(Participation(config.training, 0, federation.num_train).participants(1))
    training = config.training  # in samples, not in steps: a client's last batch of an epoch is smaller than the others
    per_round = participants * training.epochs * float(federation.num_train.mean()) / training.batch_size
    tests = int(federation.num_test.sum()) if case == "cnn" else 0
    if algorithm == "fedgmh":  # tests only clients that changed, and computes class means: forwards as many
        tests = int(federation.num_test[:participants].sum() + federation.num_train[:participants].sum())
    chosen = f"{config.runtime.executor}->{prepare(config, cpu, federation=federation).config.runtime.executor}"
    floors: list[float] = []
    rounds: list[dict[str, float]] = []

    def measure_floor() -> None:
        transport.barrier()
        began = time.perf_counter()
        bare = {"mlp": bare_modules, "resnet18": bare_resnet18}.get(case, bare_cnn)
        bare(per_round / transport.size, tests / transport.size, config.training.batch_size, precision, dataset)
        transport.barrier()
        floors.append(time.perf_counter() - began)

    with tempfile.TemporaryDirectory() as folder:
        measure_floor()  # warm-up
        floors.clear()
        for repeat in range(2):
            measure_floor()
            progress: list[Progress] = []
            run(config, Path(folder) / str(repeat), place, progress.append, federation=federation)
            rounds += [one.seconds for one in progress]
            measure_floor()
    if transport.rank == 0:
        floor = statistics.median(floors)
        # The first round of a run warms up, and the last one always tests.
        last = repeats if case == "cnn" else repeats - 1
        warm = [one for i, one in enumerate(rounds) if 0 < i % repeats < last]
        parts = {name: statistics.median(one[name] for one in warm) for name in warm[0]}
        whole = parts["compute"] if case == "mlp" else parts["round"]
        ratio = floor / whole if case == "mlp" else whole / floor
        detail = "  ".join(f"{name} {value:.3f}" for name, value in parts.items())
        print(
            f"{case} {algorithm} {precision} {chosen}  "
            f"ranks {transport.size}  product {whole:.3f} s  floor {floor:.3f} s  ratio {ratio:.2f}   ({detail})",
            flush=True,
        )
    transport.close()


def bare_cnn(steps: float, tests: float, batch_size: int, precision: str, dataset: object) -> None:
    """Run SGD steps and test forwards of the CNN with nothing around them."""
    import torch
    from torch.nn import functional as F

    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.02).requires_grad_()

    w1, b1, w2, b2 = draw(32, 3, 5, 5), draw(32), draw(64, 32, 5, 5), draw(64)
    w3, b3, w4, b4 = draw(512, 1600), draw(512), draw(10, 512), draw(10)
    leaves = [w1, b1, w2, b2, w3, b3, w4, b4]

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(F.conv2d(x, w1, b1), 2))
        x = F.relu(F.max_pool2d(F.conv2d(x, w2, b2), 2))
        return F.linear(F.relu(F.linear(x.flatten(1), w3, b3)), w4, b4)

    x = torch.randn(batch_size, 3, 32, 32, generator=generator).to(memory_format=torch.channels_last)
    y = torch.arange(batch_size) % 10
    bf16 = precision == "bf16"
    for _ in range(round(steps)):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            scores = forward(x)
        gradients = torch.autograd.grad(F.cross_entropy(scores.float(), y), leaves)
        with torch.no_grad():
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf.sub_(gradient, alpha=0.01)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        x = torch.randn(256, 3, 32, 32, generator=generator).to(memory_format=torch.channels_last)
        for _ in range(round(tests / 256)):
            forward(x)


def bare_resnet18(steps: float, tests: float, batch_size: int, precision: str, dataset: object) -> None:
    """Run SGD steps of torchvision's ResNet-18 for small images with nothing around them."""
    import torch
    from peers import work
    from torch.nn import functional as F

    torch.manual_seed(0)
    network = work.network(work.WORKS["resnet18"]).train().to(memory_format=torch.channels_last)
    leaves = list(network.parameters())
    x = torch.randn(batch_size, 3, 32, 32).to(memory_format=torch.channels_last)
    y = torch.arange(batch_size) % 10
    for _ in range(round(steps)):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            scores = network(x)
        gradients = torch.autograd.grad(F.cross_entropy(scores.float(), y), leaves)
        with torch.no_grad():
            torch._foreach_sub_(leaves, gradients, alpha=0.01)


def bare_modules(steps: float, tests: float, batch_size: int, precision: str, dataset: object) -> None:
    """Train as most code does: client after client, nn.Module, optimizer, backward."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    images, labels = torch.from_numpy(dataset.images), torch.from_numpy(dataset.labels)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    for step in range(round(steps)):
        index = order[step * batch_size : (step + 1) * batch_size]
        x, y = images.index_select(0, index).float().div_(127.5).sub_(1), labels[index]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def main() -> None:
    """Start one process per core for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="one of CASES; all by default")
    parser.add_argument("--algorithms", nargs="*", default=["fedavg", "fedgmh"])
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.repeats < 3:
        parser.error(f"--repeats {options.repeats}: at least 3, as the first and the last round of a run do not count")
    if options.worker:
        worker(*options.worker, options.repeats)
        return
    from pflmpi.machine import cores

    for case in options.cases or CASES:
        for algorithm in {"cnn": options.algorithms, "mlp": ["local"]}.get(case, ["fedavg"]):
            for precision in ("fp32",) if case == "mlp" else ("fp32", "bf16"):
                launcher = [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--standalone",
                    f"--nproc-per-node={len(cores())}",
                ]
                subprocess.run(
                    [*launcher, __file__, "--repeats", str(options.repeats), "--worker", case, algorithm, precision],
                    check=True,
                )


if __name__ == "__main__":
    main()
