"""How large messages reach GPUs, in the situations that placement is tested in; and where they then arrive."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from test_gpu_placement import SITUATIONS

import stub_run
from every_algorithm import every_algorithm
from pflmpi import machine, tree
from pflmpi.doctor.facts import read_torch
from pflmpi.learning.task import HOST
from pflmpi.messages.downlink import broadcast_tree
from pflmpi.messages.packing import pack
from pflmpi.runtime.config import RuntimeConfig
from pflmpi.runtime.devices import GpuMessages, gpu_messages, place_ranks
from pflmpi.transports.base import Buffer
from pflmpi.transports.inprocess import InProcessTransport
from stub_device import DEVICE, StubTensor, stub_device


def way(name: str, transport: str, answers: Sequence[bool | None] = (None,), between: Any = "auto") -> GpuMessages:
    """The way in a situation; the last of the libraries' answers is that of all other ranks."""
    situation = SITUATIONS[name]
    peers = [
        replace(peer, device_buffers=answers[min(rank, len(answers) - 1)])
        for rank, peer in enumerate(situation.peers())
    ]
    return gpu_messages(place_ranks(peers, RuntimeConfig(**situation.runtime)), transport, between)


def test_amds_library_goes_by_its_name(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    assert way("one node, a rank for each GPU", "torch").text == "RCCL from GPU to GPU, on ranks 0-3"
    assert machine.gpu_platform() == ("HIP 6.4.43482", "RCCL")
    assert read_torch({}).platform == "HIP 6.4.43482, RCCL"


@pytest.mark.parametrize("name", SITUATIONS)
@pytest.mark.parametrize("transport", ["torch", "mpi"])
def test_a_user_may_send_everything_through_the_host(transport, name):
    messages = way(name, transport, [True], "host")
    assert messages.ranks == () and not messages.nccl
    assert not messages.text or messages.text.endswith("through the host: runtime.between_gpus = 'host'")


@pytest.mark.parametrize("name", SITUATIONS)
def test_ranks_with_a_gpu_each_talk_by_nccl(name):
    situation, messages = SITUATIONS[name], way(name, "torch")
    computing = tuple(rank for rank, gpu in enumerate(situation.expected) if gpu != "cpu")
    between = situation.nccl and len(computing) > 1
    assert messages.ranks == (computing if between else ())
    assert ("NCCL from GPU to GPU" in messages.text) == between
    assert ("which stands for it" in messages.text) == (between and situation.serves_only)
    assert bool(messages.text) == (len(situation.ranks) > 1 and bool(computing))


@pytest.mark.parametrize("name", SITUATIONS)
def test_mpi_moves_gpu_memory_if_the_libraries_of_all_ranks_can(name):
    situation, messages = SITUATIONS[name], way(name, "mpi", [True])
    computing = tuple(rank for rank, gpu in enumerate(situation.expected) if gpu != "cpu")
    assert messages.ranks == (computing if len(situation.ranks) > 1 else ())
    assert messages.text.startswith("MPI from GPU to GPU, on ") == bool(messages.ranks)


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([False], "the library of every rank cannot move memory of a GPU"),
        ([None], "the library of every rank does not say that it can move memory of a GPU"),
        ([True, False, True], "the library of rank 1 (host a, process 1) cannot move"),
        ([True, True, None, True], "the library of rank 2 (host a, process 2) does not say"),
        ([None, False, True], "the library of rank 1 (host a, process 1) cannot move"),
        ([False, True], "the library of rank 0 (host a, process 0) cannot move"),  # which only serves
    ],
)
def test_one_library_that_cannot_is_enough_for_all_to_go_through_the_host(answers, words):
    messages = way("clients + 1 ranks: the server leaves the GPUs to them", "mpi", answers)
    assert messages.ranks == () and messages.text.startswith("MPI, through the host: ") and words in messages.text


class OneOfTwo(InProcessTransport):
    """A rank that shows what it gives to a broadcast, and gets what rank 0 would have sent."""

    def __init__(self, rank: int, takes: bool, sent: np.ndarray) -> None:
        super().__init__()
        self.rank, self.size, self.given, self._takes, self._sent = rank, 2, list[Buffer](), takes, sent

    def takes_gpu_memory(self, size: int, peer: int | None = None) -> bool:
        return self._takes

    def _broadcast(self, buffer: Buffer) -> None:
        self.given.append(buffer)
        if self.rank and isinstance(buffer, StubTensor):
            buffer.values.copy_(torch.from_numpy(self._sent))
        elif self.rank:
            assert isinstance(buffer, np.ndarray)
            buffer[:] = self._sent


MESSAGE = {"b": torch.arange(3.0), "counts": torch.tensor(7), "is": torch.tensor([True]), "w": torch.ones(2, 5)}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("takes", [False, True])
def test_a_message_to_all_arrives_on_the_gpu_by_one_copy_or_none(rank, takes):
    packed = pack({**MESSAGE})
    transport = OneOfTwo(rank, takes, packed)
    with stub_device() as stub:
        received = broadcast_tree(transport, {**MESSAGE} if rank == 0 else None, {**MESSAGE}, DEVICE)
        directly = takes and rank == 1
        assert (stub.counts.uploads, stub.counts.downloads, stub.counts.syncs) == (not directly, 0, 0)
        assert [isinstance(sent, StubTensor) for sent in transport.given] == [takes]
        assert not tree.differences(tree.like(received), tree.like({**MESSAGE}))
        for path, leaf in tree.leaves(received):
            assert leaf.device == DEVICE and torch.equal(leaf.cpu(), MESSAGE[path])


def test_a_rank_without_a_gpu_gets_the_message_on_its_host():
    transport = OneOfTwo(1, True, pack({**MESSAGE}))
    received = broadcast_tree(transport, None, {**MESSAGE}, HOST)
    assert isinstance(transport.given[0], np.ndarray)
    for path, leaf in tree.leaves(received):
        assert torch.equal(leaf, MESSAGE[path])


@pytest.mark.parametrize("takes", [False, True])
def test_a_round_has_the_same_bits_each_way(takes):
    raw = stub_run.settings(every_algorithm()["fedavg"], "mlp", "lanes")
    expected = stub_run.run(raw, False)
    with mock.patch.object(InProcessTransport, "takes_gpu_memory", lambda self, size, peer=None: takes):
        result = stub_run.run(raw, True)
    for path, leaf in expected.values.items():
        assert torch.equal(result.values[path], leaf), path


def test_what_nccl_takes_grows_where_ranks_send_each_other_parts():
    """8 ranks on a node, of which the published figures are: 1.06 GB, and 4.34 GB once all have sent to all."""
    messages = GpuMessages(tuple(range(1, 9)), "", nccl=True)
    assert messages.memory(1, on_node=8, parts=False) == pytest.approx(1.06e9)
    assert messages.memory(1, on_node=8, parts=True) == pytest.approx(4.34e9)
    assert messages.memory(1, on_node=1, parts=True) == pytest.approx(1.06e9)
    assert messages.memory(0, on_node=8, parts=True) == 0, "rank 0 has no GPU"
    assert replace(messages, nccl=False).memory(1, on_node=8, parts=True) == 0


def test_in_one_process_what_is_shared_is_not_copied_unless_it_lies_otherwise():
    sent: tree.Tree = {"a": torch.ones(3, 4), "b": torch.ones(3, 4).mT, "c": torch.ones(9)[1:]}
    received = broadcast_tree(InProcessTransport(), sent, tree.like(sent), HOST)
    same = {path: leaf.data_ptr() == tree.at(sent, path).data_ptr() for path, leaf in tree.leaves(received)}
    assert same == {"a": True, "b": False, "c": False}
    assert all(leaf.is_contiguous() and torch.equal(leaf, tree.at(sent, path)) for path, leaf in tree.leaves(received))
