"""On a GPU batches begin where new memory does: kernels choose by alignment, captured steps have their own memory."""

import pytest
import torch

from pflmpi.runtime.executors.batches import aligned
from stub_device import DEVICE, stub_device


@pytest.mark.parametrize(("features", "copies"), [(64, 0), (13, 3), (32, 2)])
def test_batches_that_begin_elsewhere_are_copied(features: int, copies: int) -> None:
    values = torch.arange(4.0 * features).view(4, 1, features)
    with stub_device() as stub:
        parts = values.to(DEVICE).unbind(0)
        before = stub.counts.launches
        found = list(aligned(parts))
        assert stub.counts.launches - before == copies
        assert [one.cpu().tolist() for one in found] == values.tolist()


def test_on_a_cpu_they_stay_where_they_are() -> None:
    parts = torch.zeros(4, 13).unbind(0)
    assert [one.data_ptr() for one in aligned(parts)] == [one.data_ptr() for one in parts]
