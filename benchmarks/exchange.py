"""Seconds of an exchange of ResNet-18, and bytes up.

    python benchmarks/exchange.py [--repeats N]       on this machine, over MPI and gloo

1 rank with 4 participants, 2 ranks with 2 each, 4 ranks with 1 each, 2 ranks with 8 each. An exchange folds the
participants' models and sends the mean back to all ranks; nothing is trained. Seconds are medians on rank 0, from the
moment when all ranks are ready. Sent: by the busiest rank on the way up; moved: by all of them; both in models.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

LAYOUTS = ((1, 4), (2, 2), (4, 1), (2, 8))  # ranks, and participants of each


def worker(participants: int, repeats: int) -> None:
    """Measure on this rank; rank 0 prints a line of the table."""
    import numpy as np
    import torch

    from pflmpi import tree
    from pflmpi.learning.task import Task
    from pflmpi.learning.training import TrainingConfig
    from pflmpi.messages.declared import Declared
    from pflmpi.messages.downlink import send_down
    from pflmpi.messages.kinds import Mean, Shared
    from pflmpi.messages.slices import cut_slices
    from pflmpi.messages.uplink import send_up
    from pflmpi.models import MODELS
    from pflmpi.transports import open_transport
    from pflmpi.transports.detect import detect

    torch.set_num_threads(1)
    transport = open_transport("auto", detect(os.environ), 600.0)
    clients = np.arange(transport.size * participants)
    assigned = [list(part.reshape(-1, 1)) for part in np.split(clients, transport.size)]
    task = Task(MODELS["resnet18"]().bind((3, 32, 32), 10), TrainingConfig(), 4, 0, (0.5,), (0.5,))
    model = task.init()
    like, size = tree.like(model), tree.num_bytes(model)
    holds = np.ones((len(clients), 1), bool)
    declared = Declared({"model": Mean(like)}, {"model": Shared(like)}, holds, 100 + clients)
    mine = assigned[transport.rank]
    values = [(group, {"model": tree.map(lambda leaf: leaf.clone().unsqueeze(0), model)}) for group in mine]
    found: list[float] = []
    for _ in range(repeats + 1):
        transport.barrier()
        transport.take_moved("data")
        began = time.perf_counter()
        folded = send_up(transport, declared, values, assigned)
        moved = transport.take_moved("data")[1] / size
        send_down(transport, declared, folded, assigned)
        found.append(time.perf_counter() - began)
    if transport.rank == 0:
        slices = cut_slices(declared.entries, assigned)
        sent = (slices.traffic.sent + slices.finished).max() / size
        low, middle, high = statistics.quantiles(found[1:], n=4)  # the first connects
        columns = [transport.name, transport.size, participants, f"{middle:.3f}", f"{(high - low) / middle:.0%}"]
        print("|", " | ".join(map(str, [*columns, f"{sent:.2f}", f"{moved:.2f}"])), "|", flush=True)
    transport.exit(0)


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options.worker, options.repeats)
    print("| transport | ranks | participants each | seconds | spread | sent | moved |", "|---" * 7 + "|", sep="\n")
    programs = Path(sys.executable).parent
    for ranks, participants in LAYOUTS:
        words = [__file__, "--worker", str(participants), "--repeats", str(options.repeats)]
        mpi = [str(programs / "mpirun"), "-n", str(ranks), sys.executable, *words]
        torch = [str(programs / "torchrun"), "--standalone", f"--nproc-per-node={ranks}", *words]
        for command in (mpi, torch) if ranks > 1 else ([sys.executable, *words],):
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    main()
