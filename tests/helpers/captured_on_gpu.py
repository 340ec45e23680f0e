"""`captured_on_gpu.py MODEL EXECUTOR [CASE ...]`: what algorithms come to on a GPU, without cases all of them.

Captured steps must have the bits of plain ones, and those of a second run; they must be close to the host's. In a
process of its own, since a process that has the stub device gets no pinned memory from PyTorch.
"""

import logging
import sys
from typing import Any

import torch
from torch import Tensor

import stub_run
from every_algorithm import Sections, every_algorithm
from pflmpi.learning import replay
from pflmpi.learning.capture import graphs
from pflmpi.learning.training import TrainingConfig
from pflmpi.runtime import devices
from pflmpi.runtime.config import RuntimeConfig

CLOSE = 1e-3  # float32 sums in another order, for two rounds of 24 steps
OWN_STEPS = ("l2gd", "perfedavg", "pfedme")  # take gradients themselves, of which no step is recorded


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def check(case: Sections, model: str, executor: str, device: torch.device) -> str:
    """One line of what was seen; raises `AssertionError` where something does not hold."""
    raw: dict[str, Any] = stub_run.settings(case, model, executor, steps=24)
    raw["training"] |= {"rounds": 2, "lr_decay": 0.9}  # the second round captures anew
    captures, launches, said = list[int](), list[int](), _Said()
    graphs.say_why_not.cache_clear()
    logging.getLogger("pflmpi").addHandler(said)

    def counted(work: graphs.Work) -> graphs.Work:
        captures.append(1)
        launch = graphs.cuda_graph(work)
        return lambda: (launches.append(1), launch())

    with graphs.captured_by("cuda", counted):
        captured = stub_run.run(raw, False, device).values
        again = stub_run.run(raw, False, device).values
    with replay.step_by_step():
        plain = stub_run.run(raw, False, device).values
    logging.getLogger("pflmpi").removeHandler(said)
    host = stub_run.run(raw, False).values
    assert not _differing(captured, again), f"a second run has other bits in {_differing(captured, again)}"
    assert not _differing(captured, plain), f"plain steps have other bits in {_differing(captured, plain)}"
    far = max(_distance(captured[path].cpu(), leaf) for path, leaf in host.items() if leaf.is_floating_point())
    line = f"{len(captures)} captures, {len(launches)} launches, {far:.1e} from the host; {'; '.join(said.lines)}"
    assert far < CLOSE, line
    expected = 0 if case["algorithm"]["name"] in OWN_STEPS else 2
    assert len(captures) >= expected and bool(launches) == bool(expected) and not said.lines, line
    return line


def main(model: str, executor: str, *cases: str) -> int:
    """How many cases fail; each is printed."""
    device, failed = torch.device("cuda", 0), 0
    devices.fix_kernels(device, RuntimeConfig(), TrainingConfig())
    for name, case in every_algorithm().items():
        if cases and name not in cases:
            continue
        try:
            print(f"{name} holds: {check(case, model, executor, device)}", flush=True)
        except Exception as error:  # the other cases are of interest too
            failed += 1
            print(f"{name} FAILS: {type(error).__name__}: {error}", flush=True)
    return failed


def _differing(some: dict[str, Tensor], others: dict[str, Tensor]) -> list[str]:
    return [path for path, leaf in some.items() if not torch.equal(leaf, others[path])]


def _distance(some: Tensor, other: Tensor) -> float:
    return float((some - other).abs().max()) if some.numel() else 0.0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
