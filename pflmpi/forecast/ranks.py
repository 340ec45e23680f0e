"""Where the ranks of a run would be: their nodes, their GPUs, and which share one."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from pflmpi.errors import ConfigError
from pflmpi.machine import Gpu
from pflmpi.runtime.config import RuntimeConfig
from pflmpi.runtime.devices import GpuMessages, GpuPlacement, gpu_messages, place_ranks
from pflmpi.transports.peers import Peer

TransportName = Literal["inprocess", "mpi", "torch"]


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run."""

    node: tuple[int, ...]  # [R] the node of each
    gpu: tuple[int | None, ...]  # [R] the number of its GPU on its node; None for the CPU
    slots: int  # how many ranks can compute at once on all nodes
    runtime: RuntimeConfig  # the settings, with what follows from the ranks
    messages: GpuMessages  # how large messages reach the GPUs
    remark: str  # what a user should know of it; "" for nothing

    @property
    def count(self) -> int:
        return len(self.node)

    @cached_property
    def of_node(self) -> list[list[int]]:
        ranks: list[list[int]] = [[] for _ in range(self.node[-1] + 1)]
        for rank, node in enumerate(self.node):
            ranks[node].append(rank)
        return ranks

    @cached_property
    def device(self) -> list[tuple[int, int | None]]:
        """[R] the node of each rank, and its GPU there or None for the CPU."""
        return list(zip(self.node, self.gpu, strict=True))


def lay_out(
    runtime: RuntimeConfig, ranks: int, nodes: int, gpus: int, cores: int, transport: TransportName = "torch"
) -> Ranks:
    """Ranks in blocks as even as they can be: the first on the first node, and so on.

    Args:
        gpus, cores: of each node.

    Raises:
        ConfigError: fewer ranks than nodes, or a device that the nodes do not have.
    """
    if ranks < nodes:
        raise ConfigError(f"--ranks {ranks} on --nodes {nodes}: give every node a rank, or take fewer nodes")
    if runtime.device == "cuda" and gpus == 0:
        raise ConfigError("runtime.device = 'cuda', and no GPUs; say how many a node has with --gpus")
    if runtime.gpus is not None and runtime.gpus > gpus > 0:
        raise ConfigError(f"runtime.gpus = {runtime.gpus}, and --gpus {gpus}; lower it or leave it null")
    node = [node for node in range(nodes) for _ in range(ranks // nodes + (node < ranks % nodes))]
    gpus_of_node = [tuple(Gpu(f"{where}/{i}", "GPU", 0) for i in range(gpus)) for where in range(nodes)]
    peers = [Peer(str(where), rank, tuple(range(cores)), gpus_of_node[where]) for rank, where in enumerate(node)]
    placed = place_ranks(peers, runtime)
    if placed.serves_only:
        runtime = runtime.model_copy(update={"server": "dedicated"})
    messages = gpu_messages(placed, transport, runtime.between_gpus)
    if transport == "mpi" and messages.text and runtime.between_gpus == "auto":  # its library is known on its nodes
        messages = replace(messages, text=f"{_describe_mpi_route(placed)}; `pflmpi doctor` there says which")
    return Ranks(tuple(node), placed.number, placed.slots, runtime, messages, placed.remark())


def _describe_mpi_route(placed: GpuPlacement) -> str:
    able = replace(placed, peers=tuple(replace(peer, device_buffers=True) for peer in placed.peers))
    return f"{gpu_messages(able, 'mpi', 'auto').text}, if the library can, else through the host"
