"""How large messages reach GPUs: a pure function of what all ranks see, so that all of them take the same way."""

from dataclasses import dataclass

from pflmpi.runtime.devices import GpuPlacement
from pflmpi.text import ranks as named
from pflmpi.transports.peers import names

# Bytes of a GPU that NCCL takes for collective calls, and for each peer on its node that it sends parts to, beyond
# unable: 1.06 GB before and 4.34 GB after the first all-to-all of 8 H100 (issue 1685 of NVIDIA/nccl). Slower links have
# fewer channels and take less, so these are upper figures.
_COLLECTIVE, _PEER = 1.06e9, (4.34e9 - 1.06e9) / 7


@dataclass(frozen=True)
class GpuMessages:
    """How large messages reach the GPUs of a run.

    Attributes:
        ranks: that exchange them from GPU to GPU; none where they go through the host.
        text: the way, and why not another one; "" without GPUs.
        nccl: whether NCCL moves them.
    """

    ranks: tuple[int, ...]
    text: str
    nccl: bool = False

    def memory(self, rank: int, on_node: int, parts: bool) -> float:
        """Bytes that the library itself takes of the GPU of a rank; MPI's are not known.

        Args:
            rank: the rank.
            on_node: ranks on its node.
            parts: whether ranks send each other parts, and not only what all receive or is summed.
        """
        if not self.nccl or rank not in self.ranks:
            return 0.0
        return _COLLECTIVE + (_PEER * (on_node - 1) if parts else 0.0)


def gpu_messages(placed: GpuPlacement, transport: str) -> GpuMessages:
    """The way for a placement of ranks over a transport, by its name."""
    computing = tuple(rank for rank, gpu in enumerate(placed.gpu) if gpu is not None)
    if not computing or len(placed.peers) == 1:
        return GpuMessages((), "")
    if transport == "mpi":
        return _by_mpi(placed, computing)
    if len(placed.gpu_ranks) > 1:
        server = "" if 0 in computing else f", and gloo between rank 0 and rank {computing[0]}, which stands for it"
        return GpuMessages(placed.gpu_ranks, f"NCCL from GPU to GPU, on {named(computing)}{server}", nccl=True)
    why = "only one rank has a GPU" if len(computing) == 1 else "NCCL needs a whole GPU for each rank"
    return GpuMessages((), f"gloo, through the host: {why}")


def _by_mpi(placed: GpuPlacement, computing: tuple[int, ...]) -> GpuMessages:
    """One library that cannot, or does not say, is enough for all to go through the host, also one of a mere server."""
    for answer, what in ((False, "cannot move"), (None, "does not say that it can move")):
        unable = [rank for rank, peer in enumerate(placed.peers) if peer.device_buffers is answer]
        if unable:
            who = "every rank" if len(unable) == len(placed.peers) else names(unable, placed.peers)
            return GpuMessages((), f"MPI, through the host: the library of {who} {what} memory of a GPU")
    return GpuMessages(computing, f"MPI from GPU to GPU, on {named(computing)}")
