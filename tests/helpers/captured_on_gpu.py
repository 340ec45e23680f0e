"""`captured_on_gpu.py MODEL EXECUTOR`: whether captured steps on a GPU have the bits of plain ones, over two rounds.

In a process of its own, since a process that has the stub device gets no pinned memory from PyTorch.
"""

import logging
import sys
from typing import Any

import torch

import stub_run
from pflmpi.learning import replay
from pflmpi.learning.capture import graphs
from pflmpi.learning.training import TrainingConfig
from pflmpi.runtime import devices
from pflmpi.runtime.config import RuntimeConfig


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main(model: str, executor: str) -> None:
    """Raise `AssertionError` where they have not."""
    device = torch.device("cuda", 0)
    devices.fix_kernels(device, RuntimeConfig(), TrainingConfig())
    raw: dict[str, Any] = stub_run.settings({"algorithm": {"name": "fedavg"}}, model, executor, steps=40)
    raw["training"] |= {"rounds": 2, "lr_decay": 0.9}  # the second round captures anew
    captures, launches, said = list[int](), list[int](), _Said()
    logging.getLogger("pflmpi").addHandler(said)

    def counted(work: graphs.Work) -> graphs.Work:
        captures.append(1)
        launch = graphs.cuda_graph(work)
        return lambda: (launches.append(1), launch())

    with graphs.captured_by("cuda", counted):
        captured = stub_run.run(raw, False, device).values
    assert len(captures) >= 2 and launches and not said.lines, (captures, launches, said.lines)
    with replay.step_by_step():
        plain = stub_run.run(raw, False, device).values
    for path, leaf in plain.items():
        assert torch.equal(captured[path], leaf), path


if __name__ == "__main__":
    main(*sys.argv[1:])
