"""How many ranks a run has where nobody says it."""

import pytest
import torch

from pflmpi.commands import launch
from pflmpi.runtime.config import RuntimeConfig


@pytest.mark.parametrize(
    ("visible", "gpus", "jobs", "expected"),
    [
        (4, None, 1, 4),
        (4, 2, 1, 2),
        (4, 8, 1, 4),
        (4, None, 2, 2),
        (4, 1, 2, 1),  # jobs share the GPUs, and each takes no more than it may
        (4, 3, 2, 2),
        (1, None, 4, 1),
        (0, None, 1, 6),
        (0, 2, 4, 1),
        (0, None, 9, 1),
    ],
)
def test_ranks_are_as_many_as_gpus_or_else_cores(visible, gpus, jobs, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(launch, "num_cores", lambda _: 6)
    assert launch.default_ranks(RuntimeConfig(gpus=gpus), jobs) == expected
    assert launch.default_ranks(RuntimeConfig(gpus=gpus, device="cpu"), jobs) == max(1, 6 // jobs)
    assert launch.default_ranks(RuntimeConfig(device="cpu", threads=2), jobs) == max(1, 3 // jobs)
