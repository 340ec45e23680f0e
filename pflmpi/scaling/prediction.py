"""What `plan` predicts for a point, in a process of its own: python -m pflmpi.scaling.prediction CONFIG OUT RESOURCES.

Memory is predicted from what the process has loaded, so that a process can do it for one point only.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pflmpi import machine
from pflmpi.config.load import load
from pflmpi.errors import UserError
from pflmpi.forecast.cache import Cache
from pflmpi.forecast.forecast import Resources, predict
from pflmpi.scaling import records
from pflmpi.scaling.points import ScaleRun


@dataclass(frozen=True)
class Machines:
    """The machines that the points are measured on.

    Attributes:
        nodes: that a number of ranks is spread over.
        gpus: of each node.
        transport: that moves the messages.
        cache: folder of stored measurements of this machine.
    """

    nodes: Callable[[int], int]
    gpus: int
    transport: str
    cache: Path

    def resources(self, ranks: int) -> Resources:
        """Machines for so many ranks, each like this one."""
        memory = next((gpu.memory for gpu in machine.gpus(None)), None) if self.gpus else None
        nodes, cores = self.nodes(ranks), len(machine.cores())
        return Resources(ranks, nodes, self.gpus, cores, machine.memory().total, memory, delay=None, rate=None)


def predict_points(some: Sequence[ScaleRun], out: Path, machines: Machines) -> None:
    """Write what is predicted for each number of ranks among some runs, beside them, unless it is known."""
    for one in some:
        path = records.plan_file(out, one.ranks)
        if "seconds" not in records.read(path):
            _predict_apart(one.config(out), path, machines.resources(one.ranks), machines)


def _predict_apart(config: Path, out: Path, resources: Resources, machines: Machines) -> None:
    """Write the prediction, or why there is none, to `out`."""
    overrides = [f"runtime.transport={machines.transport}"] if resources.ranks > 1 else []
    words = [str(config), str(out), json.dumps(asdict(resources)), str(machines.cache), *overrides]
    done = subprocess.run(
        [sys.executable, "-P", "-m", __name__, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        last = (done.stderr.strip() or f"ended with {done.returncode}").splitlines()[-1]
        records.write(out, {"problem": last})


def prediction(config: Path, resources: Resources, cache: Path, overrides: Sequence[str]) -> Mapping[str, Any]:
    """Seconds of a round and of its parts, bytes of memory and bytes between ranks; or the problem."""
    try:
        found = predict(load(config, overrides), resources, Cache(cache))
    except UserError as error:
        return {"problem": str(error)}
    memory = [rank.total for rank in found.memory]
    values = {
        "memory_rank_bytes": max(memory),
        "memory_bytes": sum(memory),
        "wire_bytes": sum(wire for _, _, wire in found.bytes_per_round()),
    }
    if found.seconds is None:
        return {**values, "problem": "nothing could be measured for the seconds of a round"}
    parts = {**asdict(found.seconds), "talk": found.seconds.talk or 0.0}
    return {**values, "seconds": found.seconds.round, **{f"{name}_seconds": value for name, value in parts.items()}}


if __name__ == "__main__":
    config, out, resources, cache, *overrides = sys.argv[1:]
    known = Resources(**json.loads(resources))
    records.write(Path(out), dict(prediction(Path(config), known, Path(cache), overrides)))
