"""Personal adapters on a frozen vision transformer beside the same layers trained in full: one line of a table each.

    python benchmarks/adapters.py [--clients 100] [--rounds 3] [--width 64] [--layers 4] [--cases full/loop lora/lanes]

FedPer, all clients in every round, 20 made-up samples of 3 x 32 x 32 each, batches of 10, one epoch, one rank on the
CPU. `full`: every parameter is trained, and the MLPs of the encoder stay with a client; `lora`: the network is frozen,
its MLPs have adapters of rank 4, which stay, and the head is averaged; `head`: the head alone is trained on features
that are computed once (`model.cache_features`), and averaged by FedAvg. Memory is the most that the process had of its
own; processor seconds of a round are those of a run of all rounds less those of a run of one.
"""

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import yaml
from scale import GIB, data, watch
from torch import nn
from torchvision.models import VisionTransformer

from pflmpi.models.lora import lora
from pflmpi.store import run_folder

CASES = ("full/loop", "full/lanes", "lora/loop", "lora/lanes", "head/lanes")
HEAD = (
    "| trained | executor | of a client's own, KiB | up a client, KiB | processor, s a round | memory, GiB "
    "| newest checkpoint, MiB |\n|" + "---|" * 7
)
MLPS = "encoder.layers.*.mlp"


class ViT(VisionTransformer):
    """torchvision's vision transformer for small images; with `rank`, adapters on its MLPs and the rest frozen."""

    def __init__(self, num_classes: int, width: int = 64, layers: int = 4, rank: int = 0):
        super().__init__(
            image_size=32,
            patch_size=8,
            num_layers=layers,
            num_heads=4,
            hidden_dim=width,
            mlp_dim=4 * width,
            num_classes=num_classes,
        )
        nn.init.normal_(self.heads.head.weight, std=0.01)
        if rank:
            lora(self, [f"{MLPS}.*"], rank)


def main() -> None:
    """Measure the cases one after another, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    options = parser.parse_args()
    print(HEAD)
    with tempfile.TemporaryDirectory() as name:
        for case in options.cases:
            print(measure(options, *case.split("/"), Path(name)), flush=True)


def measure(options: argparse.Namespace, trained: str, executor: str, folder: Path) -> str:
    """One line of the table."""
    model = {"name": f"{Path(__file__).resolve()}:ViT", "head": "heads.head", "check": False}
    model |= {"width": options.width, "layers": options.layers}
    match trained:
        case "full":
            model |= {"personal": [f"{MLPS}.*"]}
        case "lora":
            model |= {"rank": 4, "trainable": ["*.lora_*", "heads.head.*"], "personal": ["*.lora_*"]}
        case "head":
            model |= {"trainable": ["heads.head.*"], "cache_features": True}
    config = {
        "data": {"path": str(data(options.clients, (3, 32, 32), folder))},
        "partition": {"name": "writers"},
        "model": model,
        "algorithm": {"name": "fedavg" if trained == "head" else "fedper"},
        "training": {"lr": 0.01},
        "evaluation": {"every": 1000},
        "runtime": {"device": "cpu", "executor": executor},
    }
    path = folder / f"{trained}-{executor}.yaml"
    path.write_text(yaml.safe_dump(config))
    runs = {rounds: folder / f"{trained}-{executor}-{rounds}" for rounds in (1, options.rounds)}
    (_, once, _, _), (_, seconds, most, _) = (
        watch(path, run, "-s", f"training.rounds={rounds}") for rounds, run in runs.items()
    )
    run, last = runs[options.rounds], options.rounds
    rows = run_folder.read_clients(run, last, np.zeros(1, np.int64))
    kept = sum(leaf[0].nbytes for _, leaves in rows.values() for leaf in leaves.values())
    up = run_folder.read_bytes(run, last)["up"].max()
    stored = sum(
        file.stat().st_size for file in [*run.glob(f"round_{last:05}*"), *run.glob(f"shards/round_{last:05}*")]
    )
    per_round = (seconds - once) / (options.rounds - 1)
    return (
        f"| {trained} | {executor} | {kept / 2**10:,.0f} | {up / 2**10:,.0f} | {per_round:.1f} | {most / GIB:.2f} "
        f"| {stored / 2**20:.1f} |"
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
