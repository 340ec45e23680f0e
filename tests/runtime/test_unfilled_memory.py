"""No result depends on what was in memory before: PyTorch need not fill every empty tensor, as it does to find that."""

import pytest
import torch
from torch.utils import deterministic

import quick_run
import stub_run
from every_algorithm import MESSAGE_KINDS, every_algorithm
from pflmpi.config import load as configuration
from pflmpi.runtime import devices


@pytest.fixture(autouse=True)
def _deterministic():
    torch.set_num_threads(1)
    filled = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    deterministic.fill_uninitialized_memory = filled


@pytest.mark.parametrize(
    ("case", "model", "executor"),
    [
        *((case, "mlp", "lanes") for case in every_algorithm()),
        *((case, "mlp", "loop") for case in MESSAGE_KINDS),
        *(("fedavg", "cnn", executor) for executor in ("loop", "lanes")),
    ],
)
def test_results_are_the_same_with_and_without_filled_memory(case, model, executor):
    results = []
    for fill in (True, False):
        deterministic.fill_uninitialized_memory = fill  # with NaN, or the largest integer
        raw = stub_run.settings(every_algorithm()[case], model, executor)
        results.append(stub_run.run(raw, on_stub=False).values)
    for path, leaf in results[0].items():
        assert torch.equal(leaf, results[1][path]), path
        assert not leaf.is_floating_point() or bool(leaf.isfinite().all()), path


def test_a_gpu_is_not_asked_to_fill_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    deterministic.fill_uninitialized_memory = True
    config = configuration.parse(quick_run.settings())
    devices.fix_kernels(torch.device("cuda", 0), config.runtime, config.training)
    assert torch.are_deterministic_algorithms_enabled() and not deterministic.fill_uninitialized_memory
