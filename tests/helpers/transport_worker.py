"""One rank of a real launch: `mpirun -n 3 python transport_worker.py WHAT`, or torchrun; rank 1 goes wrong, or 0.

`nccl` needs a GPU, which the ranks share; see `nccl_on_one_gpu`.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import numpy as np

import transport_checks
from pflmpi.errors import TransportError
from pflmpi.transports import introduce, open_transport
from pflmpi.transports.base import Transport
from pflmpi.transports.detect import detect
from pflmpi.transports.peers import Peer

if TYPE_CHECKING:
    pass

LARGE = 100_000  # bytes
LONG = 600.0  # seconds: a rank that notices only by this time limit has not noticed


def say(text):
    os.write(1, f"{text}\n".encode())  # one write: the lines of ranks do not mix


def check(transport):
    for name, run_check in transport_checks.CHECKS.items():
        run_check(transport)
        say(f"rank {transport.rank} of {transport.size} over {transport.name}: {name} holds")
    transport.barrier()
    with mock.patch.object(Transport, "max_message", 1000):
        for name, run_check in transport_checks.CHECKS.items():
            if name != "large_messages":
                run_check(transport)
    if transport.name == "torch":
        check_messages_between_gpus(transport)
    if transport.name == "mpi":
        check_messages_in_gpu_memory(transport)
    transport.close()
    transport.close()
    say(f"rank {transport.rank} closed")


def check_messages_between_gpus(transport, device="cpu", backend="gloo"):
    """By default with gloo in NCCL's place: all ranks have a GPU, or all but rank 0."""
    import torch  # which mpirun's ranks can do without

    from pflmpi.transports import torchdist
    from pflmpi.transports.torchdist import GpuGroup, TorchTransport

    assert isinstance(transport, TorchTransport)
    batch = torch.distributed.batch_isend_irecv
    for ranks in (range(transport.size), range(1, transport.size)):
        transport.use_gpus(ranks, torch.device(device if transport.rank in ranks else "cpu"), backend)
        with (
            mock.patch.object(GpuGroup, "broadcast", autospec=True, side_effect=GpuGroup.broadcast) as carried,
            mock.patch.object(torch.distributed, "batch_isend_irecv", wraps=batch) as moved,
            mock.patch.object(torchdist, "STAGED", 1 << 20),  # so that large parts pass through GPUs in pieces
        ):
            for run_check in transport_checks.CHECKS.values():
                run_check(transport)
            assert transport.takes_gpu_memory(LARGE) and not transport.takes_gpu_memory(1000)
            right = transport_checks.payload(7, LARGE)
            buffer = torch.from_numpy(right.copy() if transport.rank == 0 else np.zeros(LARGE, np.uint8))
            buffer = buffer.to(device if transport.rank in ranks else "cpu")
            transport.broadcast(buffer)
            transport_checks.same(buffer.cpu().numpy(), right)
        assert carried.call_count == 2, "only the large ones"
        assert (moved.call_count > 0) == (transport.rank in ranks and len(ranks) > 1), "likewise"


class GpuBytes:
    """Bytes as a GPU shows them to a library that can move them; they are in memory of the host."""

    is_cuda, is_cpu, device, ndim, dtype = True, False, "cuda:0", 1, "torch.uint8"

    def __init__(self, values: np.ndarray, uses: list[str]) -> None:
        self.values, self._uses = values, uses

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        self._uses.append("moved")
        return {**self.values.__array_interface__, "version": 3}

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, part: slice) -> "GpuBytes":
        return GpuBytes(self.values[part], self._uses)

    def element_size(self) -> int:
        return self.values.itemsize

    itemsize = property(element_size)

    def is_contiguous(self) -> bool:
        return bool(self.values.flags.c_contiguous)


def check_messages_in_gpu_memory(transport):
    """Rank 0 sends from its host or from its GPU, the others receive on a GPU, the last one on its host."""
    right = transport_checks.payload(7, LARGE)
    transport.use_gpus(range(transport.size), cast(Any, "cuda:0"))
    assert transport.takes_gpu_memory(LARGE) and not transport.takes_gpu_memory(1000)
    for on_host in ({0}, {transport.size - 1}):
        uses: list[str] = []
        stream = mock.Mock(synchronize=lambda uses=uses: uses.append("kernels have ended"))
        fake_torch = mock.Mock(cuda=mock.Mock(current_stream=lambda device, stream=stream: stream))
        buffer = right.copy() if transport.rank == 0 else np.zeros(LARGE, np.uint8)
        with mock.patch.dict(sys.modules, torch=fake_torch):
            transport.broadcast(buffer if transport.rank in on_host else cast(Any, GpuBytes(buffer, uses)))
        transport_checks.same(buffer, right)
        assert uses == ([] if transport.rank in on_host else ["kernels have ended", "moved"])
    size, rank, uses = transport.size, transport.rank, []
    to, of = (rank + 1) % size, (rank - 1) % size
    parts = {to: GpuBytes(transport_checks.payload(rank, LARGE), uses)}
    with mock.patch.dict(sys.modules, torch=fake_torch):
        received = transport.exchange(
            cast(Any, parts),
            {of: LARGE},
            size * LARGE,
            empty=lambda many: cast(Any, GpuBytes(np.zeros(many, "u1"), uses)),
        )
    transport_checks.same(cast(Any, received[of]).values, transport_checks.payload(of, LARGE))
    assert uses.count("moved") == 2, "from GPU to GPU"
    for run_check in transport_checks.CHECKS.values():
        run_check(transport)


def go_wrong(transport, how):
    transport.barrier()
    if how in ("late", "stopped server"):
        transport.timeout = 1.5
    if how == "kill" and transport.name == "torch":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it at once; a run goes on until it has said why
    try:
        if transport.rank == 0 and how == "stopped server":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif transport.rank == 1 and how != "stopped server":
            if how == "abort":
                transport.abort(3)
            elif how == "raise":
                raise ValueError("rank 1 is ill")
            elif how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(LONG)
        for _ in range(100_000):
            transport_checks.check_maximum(transport)
            transport_checks.check_a_random_sequence(transport)
    except TransportError as error:
        say(f"rank {transport.rank}: {error}")
        transport.abort(3)


def stop_at_the_start(rank, folder):
    """Let rank 0 stop once it hosts torch's store."""
    from pflmpi.transports import torchdist

    (folder / f"{rank} has imported torch").touch()
    while len(list(folder.glob("* has imported torch"))) < 3:
        time.sleep(0.01)
    if rank == 0:
        connect = torchdist.connect

        def stopping(*arguments):
            store = connect(*arguments)
            os.kill(os.getpid(), signal.SIGSTOP)
            return store

        setattr(torchdist, "connect", stopping)  # noqa: B010


if __name__ == "__main__":
    what, folder = sys.argv[1], Path(sys.argv[2])
    if what == "nccl":
        os.environ["NCCL_HOSTID"] = f"host-of-{os.environ['RANK']}"
    (folder / str(os.getpid())).touch()
    launch, early = detect(os.environ), what == "connected"
    if early:
        stop_at_the_start(launch.rank, folder)
    try:
        limit = 3.0 if early else LONG
        transport = open_transport("auto", launch, limit)
    except TransportError as error:
        say(f"rank {launch.rank}: {error}")
        os._exit(3)
    introduce(transport, Peer.here([0], [], ""))
    if what == "check":
        check(transport)
    elif what == "nccl":
        check_messages_between_gpus(transport, "cuda:0", "nccl")
        transport.close()
    else:
        go_wrong(transport, what)
