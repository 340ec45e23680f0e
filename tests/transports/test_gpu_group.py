"""What each rank asks NCCL to do, by PyTorch's process group that moves nothing."""

from collections import Counter
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from pflmpi.transports import gpu_group
from pflmpi.transports.gpu_group import GpuGroup

SMALL = 1 << 16
HOST = torch.device("cpu")


class Calls:
    """The calls of one rank: of each its name and, by the rank at the other end, the bytes sent and received."""

    def __init__(self) -> None:
        self.made: list[tuple[str, Counter[int], Counter[int]]] = []

    def batch(self, moves):
        sent, received = Counter[int](), Counter[int]()
        for move in moves:
            (sent if move.op is dist.isend else received)[move.peer] += move.tensor.nbytes
        self.made.append(("exchange", sent, received))
        return []

    def collective(self, name):
        def call(tensor, **more):
            self.made.append((name, Counter({-1: tensor.nbytes}), Counter()))

        return call


def of_rank(rank, size, ranks, work):
    """What a rank of so many calls, of which some have a GPU, while it does some work with its group."""
    calls = Calls()
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        with (
            mock.patch.object(dist, "batch_isend_irecv", calls.batch),
            mock.patch.object(dist, "all_reduce", calls.collective("all_reduce")),
            mock.patch.object(dist, "broadcast", calls.collective("broadcast")),
        ):
            work(GpuGroup(rank, ranks, HOST, lambda work: None, lambda work: None, "gloo"))
    finally:
        dist.destroy_process_group()
    return calls.made


@pytest.fixture(autouse=True)
def _groups_move_nothing(monkeypatch):
    new = dist.new_group
    monkeypatch.setattr(dist, "new_group", lambda ranks, backend, device_id, timeout: new(ranks, backend="fake"))


def test_what_is_staged_on_a_gpu_is_bounded_for_each_peer(monkeypatch):
    monkeypatch.setattr(gpu_group, "STAGED", 3 * SMALL)
    sizes = {2: 7 * SMALL + 5, 3: SMALL, 0: 8}  # the last is no member

    def work(group):
        parts = {rank: np.zeros(size, np.uint8) for rank, size in sizes.items()}
        sent, received = group.exchange(parts, {rank: part.copy() for rank, part in parts.items()})
        assert [*sent] == [*received] == [0], "what goes between hosts"

    _, *batches = of_rank(1, 4, [1, 2, 3], work)
    for way in (1, 2):
        assert [dict(batch[way]) for batch in batches] == [
            {2: 3 * SMALL, 3: SMALL},
            {2: 3 * SMALL},
            {2: SMALL + 5},
        ]
