"""Seconds per round with a checkpoint after every round against none.

    python benchmarks/checkpoint.py [short] [long] [many] [--ranks 1 2]

short, long: digits, 20 clients, `mlp`, FedGMH, as many local epochs as make a round of 50 ms, or of 1 s, on this
machine. many: 1,000 clients x 50 images of CIFAR-10's shape (random bytes), 50 a round, `cnn`, FedGMH, each of which
keeps a model. Runs with and without checkpoints take turns in the same processes; the first rounds do not count. The
ratio is the median over the pairs of neighbouring runs; the goals are 1.15, 1.03 and 1.10. "In all" is the processor's
time of the whole run, from its start to the last file.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GOALS = {"short": 1.15, "long": 1.03, "many": 1.10}
DIGITS = {
    "data": {"name": "digits"},
    "partition": {"name": "exdir", "clients": 20, "classes_per_client": 2, "alpha": 0.5},
    "model": {"name": "mlp"},
    "training": {"participation": 0.4, "batch_size": 10, "lr": 0.01},
}
MANY: dict[str, Any] = {
    "data": {"name": "cifar10"},
    "partition": {"name": "iid", "clients": 1000},
    "model": {"name": "cnn"},
    "training": {"participation": 0.05, "epochs": 1, "batch_size": 10, "lr": 0.01},
    "evaluation": {"every": 1000},
}
SECONDS = {"short": 0.05, "long": 1.0}  # of a round
PAIRS = {"short": 7, "long": 3, "many": 2}  # runs without and with checkpoints
ROUNDS = {"short": 160, "long": 8, "many": 16}
_NEVER = 10**6
_FIRST = 2  # rounds that do not count


@dataclass
class Measured:
    """Rounds of some runs on rank 0: seconds of each, and of its processor; of each run, the processor's by round."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)

    def milliseconds(self) -> tuple[float, float, float]:
        """Of a round: median, and the means of the processor's."""
        return 1e3 * statistics.median(self.wall), *(
            1e3 * statistics.fmean(each) for each in (self.processor, self.whole)
        )


def worker(case: str) -> None:
    """Measure on this rank; rank 0 prints."""
    import os
    import resource

    import numpy as np
    import torch

    from pflmpi.config import load as configuration
    from pflmpi.experiment import run as experiment
    from pflmpi.experiment.build import load_federation
    from pflmpi.experiment.run import RankContext
    from pflmpi.machine import cores
    from pflmpi.runtime.devices import fix_kernels
    from pflmpi.runtime.progress import Progress
    from pflmpi.transports import open_transport
    from pflmpi.transports.detect import detect

    cpu = torch.device("cpu")
    transport = open_transport("torch", detect(os.environ), 600.0)
    context = RankContext(transport, cpu, len(cores()))

    def used() -> float:
        """Seconds of the processor."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    def measure(epochs: int, every: int, rounds: int) -> Measured:
        raw: dict[str, Any] = {**(MANY if case == "many" else DIGITS), "algorithm": {"name": "fedgmh"}}
        raw["training"] = {**raw["training"], "epochs": epochs, "rounds": rounds}
        raw |= {"checkpoint": {"every": every, "keep": 3}, "runtime": {"device": "cpu"}}
        config = configuration.parse(raw)
        fix_kernels(cpu, config.runtime, config.training)
        federation = images(config) if case == "many" else load_federation(config)
        measured, last = Measured(), list[float]()

        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"

            def observe(progress: Progress) -> None:
                now = [time.perf_counter(), time.process_time()]
                if last:
                    measured.wall.append(now[0] - last[0])
                    measured.processor.append(now[1] - last[1])
                last[:] = now if progress.round >= _FIRST else []

            before = used()
            experiment.run(config, run, context, observe, federation=federation)
            measured.whole.append((used() - before) / rounds)
            transport.barrier()
        return measured

    epochs = 1
    if case in SECONDS:  # the time of a round grows evenly with the epochs
        times = [statistics.median(measure(tried, _NEVER, 12).wall or [0.0]) for tried in (1, 5)]
        wished = 1 + 4 * (SECONDS[case] - times[0]) / max(times[1] - times[0], 1e-4)
        epochs = int(transport.maximum(np.array([max(wished, 1.0) if transport.rank == 0 else 0.0]))[0])
    without, saved = Measured(), Measured()
    ratios, processor = [], []
    for pair in range(PAIRS[case]):
        both = {}
        for every in (_NEVER, 1) if pair % 2 else (1, _NEVER):
            both[every] = measure(epochs, every, ROUNDS[case])
        if transport.rank == 0:
            ratios.append(statistics.median(both[1].wall) / statistics.median(both[_NEVER].wall))
            processor.append(statistics.fmean(both[1].processor) / statistics.fmean(both[_NEVER].processor))
            for whole, part in ((without, both[_NEVER]), (saved, both[1])):
                whole.wall += part.wall
                whole.processor += part.processor
                whole.whole += part.whole
    if transport.rank == 0:
        ratio, plain, with_them = statistics.median(ratios), without.milliseconds(), saved.milliseconds()
        goal = f"goal {GOALS[case]}: {'met' if ratio <= GOALS[case] else 'missed'}"
        print(
            f"{case}, {transport.size} ranks, {epochs} epochs: {plain[0]:.1f} ms per round, {with_them[0]:.1f} with "
            f"checkpoints: ratio {ratio:.3f} ({min(ratios):.3f} to {max(ratios):.3f}; {goal}); "
            f"rank 0's processor {plain[1]:.1f} ms, {with_them[1]:.1f}: "
            f"ratio {statistics.median(processor):.3f}; in all {plain[2]:.1f} ms, {with_them[2]:.1f}",
            flush=True,
        )
    transport.close()


def images(config: Any) -> Any:
    """A federation of random images."""
    import numpy as np

    from pflmpi.data.dataset import assemble
    from pflmpi.data.federation import build

    count = 50 * MANY["partition"]["clients"]
    pixels = np.random.default_rng(0).integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)
    dataset = assemble("random", pixels, np.arange(count) % 10, np.zeros(count, bool), 10, digest="0")
    return build(dataset, config.partition, config.data, 0)


def main() -> None:
    """Start the processes of each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="short, long, many; all by default")
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
        return
    for case in options.cases or PAIRS:
        for ranks in options.ranks:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            subprocess.run([*launcher, __file__, "--worker", case], check=True)


if __name__ == "__main__":
    main()
