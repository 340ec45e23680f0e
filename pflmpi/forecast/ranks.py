"""Where the ranks of a run would be: their nodes, their GPUs, and which share one."""

from dataclasses import dataclass

from pflmpi.errors import ConfigError
from pflmpi.runtime.config import RuntimeConfig
from pflmpi.runtime.devices import for_peers, gpu_of
from pflmpi.transports.detect import Launch
from pflmpi.transports.peers import Peer, all_slots


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

    def of_node(self, node: int) -> list[int]:
        """Ranks of a node."""
        return [rank for rank, where in enumerate(self.node) if where == node]

    def sharing(self, rank: int) -> list[int]:
        """Ranks that compute on the same GPU as this one, or on the CPU of the same node."""
        return [other for other in self.of_node(self.node[rank]) if self.gpu[other] == self.gpu[rank]]


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
    usable = 0 if runtime.device == "cpu" or gpus == 0 else runtime.gpus or gpus
    node = [node for node in range(nodes) for _ in range(ranks // nodes + (node < ranks % nodes))]
    launches = [
        Launch("mpi", rank, ranks, rank - node.index(where), node.count(where)) for rank, where in enumerate(node)
    ]
    gpu = tuple(gpu_of(launch, usable, runtime.server != "shared") for launch in launches)
    here = usable or max(cores // runtime.threads, 1)
    peers = [
        Peer(str(where), rank, "cpu" if number is None else "cuda", here)
        for rank, (where, number) in enumerate(zip(node, gpu, strict=True))
    ]
    return Ranks(tuple(node), gpu, all_slots(peers), for_peers(runtime, peers))
