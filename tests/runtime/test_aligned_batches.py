"""On a GPU batches begin where new memory does: kernels choose by alignment, captured steps have their own memory."""

import pytest
import torch

from pflmpi.learning.task import Task
from pflmpi.learning.training import TrainingConfig
from pflmpi.models import MODELS
from pflmpi.runtime.executors.batches import ClientBatches, LaneBatches, Pool, aligned
from pflmpi.tree import ALIGNED
from pflmpi.vmap_lanes import behind, in_lane
from stub_device import DEVICE, stub_device

META = torch.device("meta")  # which has places in memory, and no memory


@pytest.mark.parametrize(("features", "copies"), [(64, 0), (13, 3), (32, 2)])
def test_batches_that_begin_elsewhere_are_copied(features, copies):
    values = torch.arange(4.0 * features).view(4, 1, features)
    with stub_device() as stub:
        parts = values.to(DEVICE).unbind(0)
        before = stub.counts.launches
        found = list(aligned(parts))
        assert stub.counts.launches - before == copies
        assert [one.cpu().tolist() for one in found] == values.tolist()


def begins(x):
    """The byte of its memory at which a batch begins, in lanes that of the first one."""
    if in_lane(x):
        x = behind(x)
    return int(x.storage_offset()) * x.element_size()


def test_the_batches_of_a_client_and_of_lanes_begin_so():
    task = Task(MODELS["mlp"]().bind((1, 5, 5), 3), TrainingConfig(), 2, 0, (0.5,), (0.5,)).replace(device=META)
    order = torch.empty(12, dtype=torch.int64, device=META)
    pool = Pool(torch.empty(12, 1, 5, 5, dtype=torch.uint8, device=META), labels=order)
    found = [begins(one.x) for one in ClientBatches(task, pool, order, [4] * 3)]

    def lane(images):
        labels, weight = pool.labels.view(3, 4), torch.empty(3, 4, device=META)
        batches = LaneBatches(task, lambda: (images, labels), weight, 3, together=3)
        found.extend(begins(one.x) for one in batches)
        return images

    torch.func.vmap(lane)(pool.images.view(1, 3, 4, 1, 5, 5))
    assert len(found) == 6 and all(begin % ALIGNED == 0 for begin in found), found


def test_on_a_cpu_they_stay_where_they_are():
    parts = torch.zeros(4, 13).unbind(0)
    assert [one.data_ptr() for one in aligned(parts)] == [one.data_ptr() for one in parts]
