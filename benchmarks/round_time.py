"""Seconds per round against the floor: the same SGD steps and test forwards in a bare PyTorch loop.

    python benchmarks/round_time.py [cnn] [mlp]       on all cores of this machine, one process per core

cnn: 100 clients, participation 0.2, 2 local epochs, batch 100, the 2-conv CNN on 3x32x32 (CIFAR-10's shape), in
fp32 and bf16. The floor is measured in the same processes, right before and after the product's rounds: half of
the round's steps on each of two cores, in the best layout (channels last, pooling before ReLU, one allocation per
leaf), nothing else. Ratio = product / floor.

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
    "mlp": {
        "partition": {"name": "iid", "clients": 20},
        "model": {"name": "mlp"},
        "training": {"participation": 1.0, "epochs": 1, "batch_size": 10, "lr": 0.01},
        "evaluation": {"every": 1000},
    },
}
SHAPES = {"cnn": (60000, 3, 32, 32), "mlp": (20000, 1, 28, 28)}
REPEATS = 5


def worker(case: str, algorithm: str, precision: str, repeats: int) -> None:
    """Measure on this rank; rank 0 prints."""
    import os

    import numpy as np
    import torch

    from pflmpi.config import load as configuration
    from pflmpi.data.dataset import Dataset
    from pflmpi.data.federation import build
    from pflmpi.experiment.build import assemble
    from pflmpi.experiment.execute import RankContext
    from pflmpi.experiment.start import start_prepared
    from pflmpi.machine import cores
    from pflmpi.runtime.devices import fix_kernels
    from pflmpi.transports import open_transport
    from pflmpi.transports.detect import detect

    raw = {
        **CASES[case],
        "data": {"name": "cifar10" if case == "cnn" else "fashion_mnist"},
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
    dataset = Dataset(
        name="random",
        images=rng.integers(0, 256, shape, dtype=np.uint8),
        labels=np.arange(shape[0]) % 10,
        official_test=np.zeros(shape[0], bool),
        writers=None,
        num_classes=10,
        mean=(0.5,) * shape[1],
        std=(0.5,) * shape[1],
        digest="0" * 64,
    )
    federation = build(dataset, config.partition, config.data, 0)
    experiment = assemble(config, federation, cpu)
    place = RankContext(transport, cpu, len(cores()))

    participants = len(config.training.participants(0, 1, federation.num_clients))
    training = config.training  # in samples, not in steps: a client's last batch of an epoch is smaller than the others
    per_round = participants * training.epochs * float(federation.num_train.mean()) / training.batch_size
    tests = int(federation.num_test.sum()) if case == "cnn" else 0
    if algorithm == "fedgmh":  # tests only clients that changed, and computes class means: forwards as many
        tests = int(federation.num_test[:participants].sum() + federation.num_train[:participants].sum())
    floors: list[float] = []
    rounds: list[dict[str, float]] = []

    def measure_floor() -> None:
        transport.barrier()
        began = time.perf_counter()
        bare = bare_cnn if case == "cnn" else bare_modules
        bare(per_round / transport.size, tests / transport.size, config.training.batch_size, precision, dataset)
        transport.barrier()
        floors.append(time.perf_counter() - began)

    with tempfile.TemporaryDirectory() as folder:
        measure_floor()  # warm-up
        floors.clear()
        for repeat in range(2):
            measure_floor()
            start_prepared(
                experiment, Path(folder) / str(repeat), place, lambda progress: rounds.append(progress.seconds)
            )
            measure_floor()
    if transport.rank == 0:
        floor = statistics.median(floors)
        warm = [one for i, one in enumerate(rounds) if i % repeats]  # the first round of a run warms up
        parts = {name: statistics.median(one[name] for one in warm) for name in warm[0]}
        whole = parts["round"] if case == "cnn" else parts["compute"]
        ratio = whole / floor if case == "cnn" else floor / whole
        detail = "  ".join(f"{name} {value:.3f}" for name, value in parts.items())
        print(
            f"{case} {algorithm} {precision} {config.runtime.executor}->{experiment.config.runtime.executor}  "
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
    parser.add_argument("cases", nargs="*", metavar="CASE", help="cnn, mlp; both by default")
    parser.add_argument("--algorithms", nargs="*", default=["fedavg", "fedgmh"])
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(*options.worker, options.repeats)
        return
    from pflmpi.machine import cores

    for case in options.cases or CASES:
        for algorithm in options.algorithms if case == "cnn" else ["local"]:
            for precision in ("fp32", "bf16") if case == "cnn" else ("fp32",):
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
