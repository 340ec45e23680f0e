"""Seconds of a round of every algorithm, beside FedAvg's and beside the passes through the network that it must take.

    python benchmarks/algorithm_cost.py [ALGORITHM ...]

20 clients with 56 (cnn) or 150 (mlp) training samples of random bytes, all take part, one local epoch, in this
process, with each algorithm's defaults. cnn: 28x28, batch 50, client after client; mlp: 784-100-10, batch 10, in lanes.
A forward pass counts 1, a backward pass 2, so an epoch of plain training 3; LEAST has what an algorithm needs in such
an epoch, with what is fixed computed once. Ratio = (seconds / FedAvg's) / (passes / 3): above 1 it costs more than its
passes. Medians over the repetitions, FedAvg before and after each.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np

import pflmpi

CASES = {
    "cnn": ({"name": "cnn"}, 1500, 50, "loop"),
    "mlp": ({"name": "mlp"}, 4000, 10, "lanes"),
}
LEAST = {
    **dict.fromkeys(("fedprox", "scaffold", "fednova", "fesem", "local", "fedper", "fedbabu", "lgfedavg"), 3),
    **dict.fromkeys(("fedamp", "pfedcfr", "fedrod", "gpfl"), 3),
    **dict.fromkeys(("fedproto", "fedgh", "fedgmh"), 4),  # then class means
    **dict.fromkeys(("fedrep", "fedfcd"), 4),  # features for the head's epochs, and for class means
    "fedcp": 4,  # the received body's features
    **dict.fromkeys(("fedpac", "moon", "pfedpm"), 5),  # features twice more
    **dict.fromkeys(("ditto", "apfl", "perfedavg"), 6),  # two models, or two gradients
    "pfedme": 15,  # five steps on each batch
}


def seconds(algorithm: str, case: str, data: Path, folder: Path) -> float:
    """Of the computing of a round, the median but for the first."""
    model, _, batch_size, executor = CASES[case]
    config = pflmpi.Config(
        data={"name": case, "path": str(data)},
        partition={"name": "iid", "clients": 20},
        model=model,
        algorithm=algorithm,
        training={"rounds": 4, "participation": 1.0, "epochs": 1, "batch_size": batch_size, "lr": 0.01},
        evaluation={"every": 4},
        checkpoint={"every": 4},
        runtime={"executor": executor, "device": "cpu"},
    )
    run = pflmpi.run(config, out=folder, in_process=True, quiet=True)
    return statistics.median(run.metrics["compute_seconds"][1:])


def measure(algorithm: str, case: str, repeats: int, data: Path, folder: Path) -> tuple[float, float]:
    """(seconds, seconds over FedAvg's), medians."""
    times, ratios = [], []
    for repeat in range(repeats):
        place = folder / f"{algorithm}-{repeat}"
        before, own, after = (
            seconds(name, case, data, place / str(number))
            for number, name in enumerate(("fedavg", algorithm, "fedavg"))
        )
        times.append(own)
        ratios.append(2 * own / (before + after))
    return statistics.median(times), statistics.median(ratios)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithms", nargs="*", metavar="ALGORITHM", help="default: all of LEAST")
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    for case in options.case or CASES:
        with tempfile.TemporaryDirectory() as name:
            folder, samples = Path(name), CASES[case][1]
            pixels = np.random.default_rng(0).integers(0, 256, (samples, 28, 28), np.uint8)
            np.savez(folder / "data.npz", x=pixels, y=np.arange(samples) % 10)
            for algorithm in options.algorithms or LEAST:
                took, ratio = measure(algorithm, case, options.repeats, folder / "data.npz", folder)
                least = LEAST[algorithm] / 3
                print(
                    f"{case} {algorithm:10} {took:.3f} s  {ratio:.2f} of fedavg, "
                    f"passes {least:.2f}, ratio {ratio / least:.2f}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
