"""What each rank asks NCCL to do, by PyTorch's process group that moves nothing."""

from collections import Counter
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from pflmpi import tree
from pflmpi.messages.deliver import deliver
from pflmpi.messages.kinds import tensor
from pflmpi.transports import gpu_group
from pflmpi.transports.base import Transport
from pflmpi.transports.gpu_group import GpuGroup
from stub_device import DEVICE, stub_device
from thread_transport import run_ranks

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


def of_rank(rank, size, ranks, work, device=HOST):
    """What a rank of so many calls, of which some have a GPU, while it does some work with its group."""
    calls = Calls()
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        with (
            mock.patch.object(dist, "batch_isend_irecv", calls.batch),
            mock.patch.object(dist, "all_reduce", calls.collective("all_reduce")),
            mock.patch.object(dist, "broadcast", calls.collective("broadcast")),
        ):
            work(GpuGroup(rank, ranks, device, lambda work: None, lambda work: None, "gloo"))
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


def test_parts_that_are_on_a_gpu_do_not_pass_through_the_host():
    with stub_device() as stub:
        there, other = torch.empty(2 * SMALL, dtype=torch.uint8, device=DEVICE), np.zeros(2 * SMALL, np.uint8)

        def work(group):
            stub.bytes_moved = 0
            group.exchange({1: there}, {1: torch.empty_like(there)})
            assert stub.bytes_moved == 0
            group.exchange({1: other}, {1: other})
            assert stub.bytes_moved == 2 * other.nbytes

        of_rank(0, 2, [0, 1], work, DEVICE)


def test_what_a_gpu_copies_is_in_pinned_memory(monkeypatch):
    """A process without a GPU has no pinned memory."""
    empty, pinned = torch.empty, list[bool]()
    monkeypatch.setattr(
        torch, "empty", lambda *size, pin_memory, **how: (pinned.append(pin_memory), empty(*size, **how))[1]
    )
    for device, size in ((torch.device("cuda", 1), SMALL), (torch.device("cuda", 1), SMALL - 1), (HOST, SMALL)):
        group = mock.Mock(_device=device, carries=lambda size: size >= SMALL)
        assert GpuGroup.host_buffer(group, size).nbytes == size
    assert pinned == [True, False, False]


def test_rows_that_are_sent_and_received_are_in_memory_that_the_transport_makes():
    made = list[np.ndarray]()

    def buffer(self, size):
        made.append(np.empty(size, np.uint8))
        return made[-1]

    def work(transport):
        rows: tree.Tree = {"x": torch.arange(6.0).view(2, 3)}
        found = deliver(
            transport,
            [np.array([0]), np.array([1])],
            np.zeros(2, np.int64),
            lambda ids: tree.map(lambda x: x[ids], rows),
            {"x": tensor(3)},
        )
        assert torch.equal(tree.leaf(found, "x"), torch.arange(6.0).view(2, 3)[[transport.rank]])

    with mock.patch.object(Transport, "host_buffer", buffer):
        run_ranks(2, work)
    assert [len(one) for one in made] == [12, 12], "of the sender and of the receiver"
