"""Runs an algorithm for each kind of message on however many ranks it is started on, and writes what came out.

    mpirun -n 3 python tests/helpers/everywhere_worker.py FOLDER [DATA_ROOT]

Rank 0 writes FOLDER/results.json: case -> digest of
the last round, and per round who took part, how many test samples each client got right, and the logical bytes. Without
DATA_ROOT the cases on Fashion-MNIST are left out.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import quick_run
from every_algorithm import MESSAGE_KINDS, every_algorithm
from pflmpi.config import load as configuration
from pflmpi.data.federation import Federation
from pflmpi.experiment.build import load_federation
from pflmpi.experiment.run import RankContext, run
from pflmpi.runtime.devices import fix_kernels
from pflmpi.store import run_folder
from pflmpi.transports import open_transport
from pflmpi.transports.detect import detect

ROUNDS = 3
TRAINING = {"rounds": ROUNDS, "participation": 0.4}
LANES = {"executor": "lanes", "lanes": 3, "device": "cpu"}
LOOP = {"executor": "loop", "device": "cpu"}
WIDE = {"name": "mlp", "hidden": 1300}  # large enough to be folded in slices, by up to 5 ranks
CONVOLUTIONS = {"name": "cnn", "first_channels": 3, "second_channels": 4, "hidden": 8}


def cases(data_root):
    """The configurations by name, which begins with the dataset."""
    fashion = {"name": "fashion_mnist", "root": data_root, "limit": 400}
    result = {}
    for name in MESSAGE_KINDS:
        common = quick_run.settings(every_algorithm()[name], training=TRAINING, checkpoint={"every": ROUNDS})
        result[f"digits lanes {name}"] = quick_run.settings(common, runtime=LANES)
        result[f"digits loop {name}"] = quick_run.settings(common, runtime=LOOP)
        if data_root is not None:
            result[f"fashion_mnist loop {name}"] = quick_run.settings(
                common, runtime=LOOP, data=fashion, model=CONVOLUTIONS
            )
            result[f"fashion_mnist lanes {name}"] = quick_run.settings(common, runtime=LANES, data=fashion)
    for participation in (0.4, 1.0):  # each rank sends its participants' entries, or sums
        wide = {"algorithm": {"name": "fedavg"}, "model": WIDE, "checkpoint": {"every": ROUNDS}}
        raw = quick_run.settings(wide, training={**TRAINING, "participation": participation}, runtime=LOOP)
        result[f"slices {participation}"] = raw
    return result


def run_cases(transport, launch, folder, data_root):
    """Run the cases on an open transport; return the results on rank 0."""
    federations: dict[str, Federation] = {}
    results: dict[str, Any] = {}
    for name, raw in cases(data_root).items():
        config = configuration.parse(raw)
        fix_kernels(torch.device("cpu"), config.runtime, config.training)
        if config.data.name not in federations:  # the same for all cases: data, partition and seed are
            federations[config.data.name] = load_federation(config)
        federation = federations[config.data.name]
        rounds: list[dict[str, Any]] = []

        def observe(progress, rounds=rounds):
            rounds.append(
                {
                    "participants": progress.participants.tolist(),
                    "correct": progress.scores.correct.tolist(),
                    **{way: progress.bytes[way].tolist() for way in ("up", "down")},
                }
            )

        place = RankContext(transport, torch.device("cpu"), slots=2)
        at = run(config, folder / name.replace(" ", "-"), place, observe, federation=federation)
        if transport.rank == 0:
            samples = federation.num_train.tolist()
            results[name] = {"digest": run_folder.digest(at, ROUNDS), "rounds": rounds, "samples": samples}
    return results


def main():
    """Run on the ranks that a launcher has started."""
    folder, data_root = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
    launch = detect(os.environ)
    transport = open_transport("auto", launch, timeout=600.0)
    results = run_cases(transport, launch, folder, data_root)
    if transport.rank == 0:
        results["transport"] = transport.name, transport.size
        (folder / "results.json").write_text(json.dumps(results))
    transport.exit(0)


if __name__ == "__main__":
    main()
