"""`gpu_conformance.py MODEL EXECUTOR [CASE ...]`: what algorithms come to on a GPU, without cases all of them.

Captured steps must have the bits of plain ones, and those of a second run, whose samples stay on the host; they must be
close to the host's, or not much further from it than the host is from itself when it starts with other last bits. In a
process of its own, since a process that has the stub device gets no pinned memory from PyTorch.
"""

import logging
import sys
from functools import partial
from unittest import mock

import torch

import stub_run
from every_algorithm import every_algorithm
from pflmpi import tree
from pflmpi.learning import cuda_graphs, replay
from pflmpi.learning.task import Task
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


def check(case, model, executor, device):
    """One line of what was seen; raises `AssertionError` where something does not hold."""
    raw = stub_run.settings(case, model, executor, steps=24)
    raw["training"] |= {"rounds": 2, "lr_decay": 0.9}
    captures, launches, handler = list[int](), list[int](), _Said()
    cuda_graphs.warn_not_captured.cache_clear()
    logging.getLogger("pflmpi").addHandler(handler)

    def counted(work):
        captures.append(1)
        launch = cuda_graphs.cuda_graph(work)
        return lambda: (launches.append(1), launch())

    with mock.patch.dict(cuda_graphs.BY_DEVICE, {"cuda": counted}):
        captured = stub_run.run(raw, False, device).values
        again = stub_run.run({**raw, "data": {**raw["data"], "resident": "host"}}, False, device).values
    with replay.without_replay():
        plain = stub_run.run(raw, False, device).values
    logging.getLogger("pflmpi").removeHandler(handler)
    host = _numbers(stub_run.run(raw, False).values)
    assert not _differing(captured, again), f"a second run has other bits in {_differing(captured, again)}"
    assert not _differing(captured, plain), f"plain steps have other bits in {_differing(captured, plain)}"
    far = _distance(_numbers(captured), host)
    line = f"{len(captures)} captures, {len(launches)} launches, {far:.1e} from the host; {'; '.join(handler.lines)}"
    if far >= CLOSE:
        moved = max(_distance(_numbers(values), host) for values in map(partial(_with_other_last_bits, raw), range(3)))
        line += f"up to {moved:.1e} between runs of the host that begin with other last bits"
        assert far < 4 * moved, line
    expected = 0 if case["algorithm"]["name"] in OWN_STEPS else 2
    assert len(captures) >= expected and bool(launches) == bool(expected) and not handler.lines, line
    return line


def main(model, executor, *cases):
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


def _differing(leaves, other_leaves):
    return [path for path, leaf in leaves.items() if not torch.equal(leaf, other_leaves[path])]


def _numbers(values):
    return {path: leaf.cpu() for path, leaf in values.items() if leaf.is_floating_point() and leaf.numel()}


def _distance(leaves, other_leaves):
    return max(float((leaves[path] - leaf).abs().max()) for path, leaf in other_leaves.items())


def _with_other_last_bits(raw, seed):
    """What a run on the host comes to that begins with a model whose numbers differ by about 1e-7 of them."""
    init, generator = Task.init, torch.Generator()

    def moved(task, client=-1):
        generator.manual_seed(seed)
        return tree.map(move, init(task, client))

    def move(leaf):
        factor = 1 + 1e-7 * torch.randn(leaf.shape, generator=generator)
        return leaf * factor if leaf.is_floating_point() else leaf

    with mock.patch.object(Task, "init", moved):
        return stub_run.run(raw, False).values


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
