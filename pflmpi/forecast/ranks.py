"""Where the ranks of a run would be: their nodes, their GPUs, and which share one."""

from dataclasses import dataclass
from functools import cached_property

from pflmpi.errors import ConfigError
from pflmpi.machine import Gpu
from pflmpi.runtime.config import RuntimeConfig
from pflmpi.runtime.gpu_placement import place_ranks
from pflmpi.transports.peers import Peer


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run.

    Attributes:
        node: [R] the node of each.
        gpu: [R] the number of its GPU on its node; None for the CPU.
        slots: how many ranks can compute at once on all nodes.
        runtime: the settings, with what follows from the ranks.
    """

    node: tuple[int, ...]
    gpu: tuple[int | None, ...]
    slots: int
    runtime: RuntimeConfig

    @property
    def count(self) -> int:
        """R."""
        return len(self.node)

    @cached_property
    def of_node(self) -> list[list[int]]:
        """Ranks of each node."""
        found: list[list[int]] = [[] for _ in range(self.node[-1] + 1)]
        for rank, node in enumerate(self.node):
            found[node].append(rank)
        return found

    @cached_property
    def device(self) -> list[tuple[int, int | None]]:
        """[R] the node of each rank, and its GPU there or None for the CPU."""
        return list(zip(self.node, self.gpu, strict=True))


def lay_out(runtime: RuntimeConfig, ranks: int, nodes: int, gpus: int, cores: int) -> Ranks:
    """Ranks in blocks as even as they can be: the first on the first node, and so on.

    Args:
        runtime: the `runtime` section.
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
    there = [tuple(Gpu(f"{where}/{i}", "GPU", 0) for i in range(gpus)) for where in range(nodes)]
    peers = [Peer(str(where), rank, tuple(range(cores)), there[where]) for rank, where in enumerate(node)]
    placed = place_ranks(peers, runtime)
    if placed.serves_only:
        runtime = runtime.model_copy(update={"server": "dedicated"})
    return Ranks(tuple(node), placed.number, placed.slots, runtime)
