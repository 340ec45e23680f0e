"""What each rank asks NCCL to do, by PyTorch's process group that moves nothing."""

import itertools
from collections import Counter
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from pflmpi import tree
from pflmpi.messages.deliver import deliver
from pflmpi.messages.kinds import Mean, tensor
from pflmpi.messages.slices import Entries, cut_slices
from pflmpi.transports import torchdist
from pflmpi.transports.base import Transport
from pflmpi.transports.torchdist import GpuGroup
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
    monkeypatch.setattr(torchdist, "STAGED", 3 * SMALL)
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
        on_gpu, on_host = torch.empty(2 * SMALL, dtype=torch.uint8, device=DEVICE), np.zeros(2 * SMALL, np.uint8)

        def work(group):
            stub.bytes_moved = 0
            group.exchange({1: on_gpu}, {1: torch.empty_like(on_gpu)})
            assert stub.bytes_moved == 0
            group.exchange({1: on_host}, {1: on_host})
            assert stub.bytes_moved == 2 * on_host.nbytes

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
        delivered = deliver(
            transport,
            [np.array([0]), np.array([1])],
            np.zeros(2, np.int64),
            lambda ids: tree.map(lambda x: x[ids], rows),
            {"x": tensor(3)},
        )
        assert torch.equal(tree.leaf(delivered, "x"), torch.arange(6.0).view(2, 3)[[transport.rank]])

    with mock.patch.object(Transport, "host_buffer", buffer):
        run_ranks(2, work)
    assert [len(memory) for memory in made] == [12, 12], "of the sender and of the receiver"


def a_round(group, rank, size):
    """A client's entries to each owner, slices to rank 0, the model to all, few bytes to rank 0, rows to a receiver.

    Returns the bytes that the group leaves to the hosts, of each exchange: sent and received, by the other rank.
    """
    peers, part, few = [peer for peer in range(size) if peer != rank], 5 * SMALL, 8
    model = Entries.of({"model": Mean({"x": tensor(size * SMALL)})})
    cut = cut_slices(model, [[np.array([client])] for client in range(size)])
    up = [{peer: int(ends[peer]) for peer in peers} for ends in (cut.sent_by(rank), cut.received_by(rank))]
    finished = cut.finished
    left = []
    for number, (sent, received) in enumerate(
        (
            up,
            ({0: finished[rank]} if rank else {}, {} if rank else dict(enumerate(finished[1:], 1))),
            ({0: few} if rank else {}, {} if rank else dict.fromkeys(peers, few)),
            ({(rank + 1) % size: part}, {(rank - 1) % size: part}),
        )
    ):
        parts = [{peer: np.empty(count, np.uint8) for peer, count in ends.items()} for ends in (sent, received)]
        left.append([{peer: buffer.nbytes for peer, buffer in ends.items()} for ends in group.exchange(*parts)])
        if number == 1:
            group.broadcast(torch.zeros(7 * SMALL, dtype=torch.uint8))
    return left


@pytest.mark.parametrize(("ranks", "server_has_a_gpu"), [(9, False), (9, True), (64, True), (65, False)])
def test_no_rank_waits_for_what_no_other_sends(ranks, server_has_a_gpu, monkeypatch):
    monkeypatch.setattr(torchdist, "STAGED", 2 * SMALL)
    members = [*range(0 if server_has_a_gpu else 1, ranks)]
    left = list[list[Any]]()
    calls = [
        of_rank(rank, ranks, members, lambda group, rank=rank: left.append(a_round(group, rank, ranks)))
        for rank in range(ranks)
    ]
    assert server_has_a_gpu or not calls[0], "a rank without a GPU calls none of it"
    run_against_each_other({rank: calls[rank] for rank in members})
    for rank, peer in itertools.permutations(range(ranks), 2):  # what goes between hosts
        for rank_bytes, peer_bytes in zip(left[rank], left[peer], strict=True):
            assert rank_bytes[0].get(peer) == peer_bytes[1].get(rank)


def test_calls_that_do_not_fit_each_other_are_found():
    exchange = [("exchange", Counter({1: 8}), Counter()), ("exchange", Counter(), Counter({0: 9}))]
    for wrong in (exchange, [("broadcast", Counter(), Counter()), exchange[1]]):
        with pytest.raises(AssertionError, match=r"\[0, 1\] wait for each other"):
            run_against_each_other({rank: [call] for rank, call in enumerate(wrong)})


def run_against_each_other(calls):
    """Let each rank make its calls in order.

    A part moves when both ends are in a batch that has it, with one size; a batch ends when all its parts have moved,
    a collective call when all ranks are in the same one.
    """
    calls = {
        rank: [(name, dict(sent), dict(received)) for name, sent, received in made] for rank, made in calls.items()
    }
    while any(calls.values()):
        now = {rank: made[0] for rank, made in calls.items() if made}
        moved = False
        for rank, (name, sent, _) in now.items():
            for peer, size in [*sent.items()] if name == "exchange" else ():
                if peer in now and now[peer][2].get(rank) == size:
                    del sent[peer], now[peer][2][rank]
        together = len(now) == len(calls) and all(call == now[min(now)] for call in now.values())
        for rank, (name, sent, received) in now.items():
            if together or (name == "exchange" and not sent and not received):
                calls[rank].pop(0)
                moved = True
        assert moved, f"ranks {[*now]} wait for each other"
