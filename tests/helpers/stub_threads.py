"""Ranks as threads that have a stub device each, with a transport that takes messages from there, as NCCL does."""

from unittest import mock

from stub_device import StubTensor, stub_device
from thread_transport import ThreadTransport, run_ranks


def run_stub_ranks(size, function, members):
    """What a function of the transport and the device of a rank returns on each rank; `members` have a device."""
    exchange = ThreadTransport._exchange

    def takes(self, size, peer=None):
        return self.rank in members and (peer is None or peer in members)

    def from_devices(self, sent, received):
        exchange(self, *({rank: _bytes(part) for rank, part in parts.items()} for parts in (sent, received)))

    def work(transport):
        with stub_device() as stub:
            return function(transport, stub)

    with (
        mock.patch.object(ThreadTransport, "takes_gpu_memory", takes),
        mock.patch.object(ThreadTransport, "_exchange", from_devices),
    ):
        return run_ranks(size, work)


def _bytes(part):
    return part.values.numpy() if isinstance(part, StubTensor) else part
