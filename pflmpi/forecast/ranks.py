"""Layout of a planned run: the node and the GPU of each rank."""

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

    node: tuple[int, ...]  # [R] node of each rank
    gpu: tuple[int | None, ...]  # [R] number of its GPU on its node; None for the CPU
    slots: int  # number of ranks that can compute at the same time
    runtime: RuntimeConfig  # with runtime.server resolved
    messages: GpuMessages  # how large messages reach the GPUs
    remark: str  # a caveat for the user, or ""

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
        """[R] (node, GPU number or None for the CPU) of each rank."""
        return list(zip(self.node, self.gpu, strict=True))


def lay_out(
    runtime: RuntimeConfig, ranks: int, nodes: int, gpus: int, cores: int, transport: TransportName = "torch"
) -> Ranks:
    """Lays out ranks over nodes in consecutive, even blocks.

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
    node_of = [node for node in range(nodes) for _ in range(ranks // nodes + (node < ranks % nodes))]
    gpus_of = [tuple(Gpu(f"{node}/{i}", "GPU", 0) for i in range(gpus)) for node in range(nodes)]
    peers = [Peer(str(node), rank, tuple(range(cores)), gpus_of[node]) for rank, node in enumerate(node_of)]
    placed = place_ranks(peers, runtime)
    if placed.serves_only:
        runtime = runtime.model_copy(update={"server": "dedicated"})
    messages = gpu_messages(placed, transport, runtime.between_gpus)
    if transport == "mpi" and messages.text and runtime.between_gpus == "auto":  # only its nodes know the library
        messages = replace(messages, text=f"{_describe_mpi_route(placed)}; `pflmpi doctor` there says which")
    return Ranks(tuple(node_of), placed.number, placed.slots, runtime, messages, placed.remark())


def _describe_mpi_route(placed: GpuPlacement) -> str:
    able = replace(placed, peers=tuple(replace(peer, device_buffers=True) for peer in placed.peers))
    return f"{gpu_messages(able, 'mpi', 'auto').text}, if the library can, else through the host"
