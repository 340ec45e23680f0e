"""The GPU, executor, threads and kernels of each rank, and how large messages reach GPUs.

The GPU of a rank and the route of messages are pure functions of what all ranks see.
"""

import contextlib
import ctypes
import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, Literal

import numpy as np
import torch
from torch.utils import deterministic

from pflmpi import machine, tree
from pflmpi.errors import ConfigError
from pflmpi.learning.task import Task
from pflmpi.learning.training import TrainingConfig
from pflmpi.machine import SLICE, Gpu
from pflmpi.runtime.config import RuntimeConfig
from pflmpi.runtime.placement import MAX_TOGETHER
from pflmpi.text import format_bytes, format_ranks
from pflmpi.transports.peers import Peer, describe_ranks

_log = logging.getLogger(__name__)

CUDA_CONTEXT_BYTES = (
    500 * 2**20
)  # bytes that CUDA itself takes of a GPU for each process; it differs little between GPUs
_MIN_TOGETHER = 4  # participants in one call, where their number is not configured
_CPU_CACHE = 4 * 2**20  # bytes of their models on a CPU: ten MLPs of 100 hidden units in one call beat twice five
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of glibc's malloc.h
# Bytes of a GPU that NCCL takes for collective calls, and for each peer on its node that it sends parts to: 1.06 GB
# before and 4.34 GB after the first all-to-all of 8 H100 (issue 1685 of NVIDIA/nccl). Slower links have fewer channels
# and take less, so these are upper bounds.
_NCCL_COLLECTIVE, _NCCL_PEER = 1.06e9, (4.34e9 - 1.06e9) / 7
_ONE_GPU_EACH = (
    "each rank sees one GPU alone, so NCCL and MPI may go through the host instead of from GPU to GPU (NVLink); "
    "ask Slurm for --gpus-per-node=N with --gpu-bind=none, not for GPUs per task: ranks share out what all of them see"
)


@dataclass(frozen=True)
class GpuPlacement:
    """Placement of the ranks on GPUs or the CPU.

    Attributes:
        peers: [R] where each rank runs and what it sees.
        number: [R] the GPU of each rank, as an index into the GPUs that the rank sees; None for the CPU.
        serves_only: rank 0 computes no clients, because it alone has no GPU.
        slots: how many ranks can compute at once.
    """

    peers: tuple[Peer, ...]
    number: tuple[int | None, ...]
    serves_only: bool
    slots: int

    @cached_property
    def gpu(self) -> tuple[Gpu | None, ...]:
        """[R] the GPU of each rank."""
        return tuple(
            None if number is None else peer.gpus[number] for peer, number in zip(self.peers, self.number, strict=True)
        )

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        """Type of the devices that compute clients."""
        return "cpu" if all(gpu is None for gpu in self.gpu) else "cuda"

    @property
    def models(self) -> tuple[str, ...]:
        """The GPU models, in alphabetical order; empty on the CPU."""
        return tuple(sorted({gpu.model for gpu in self.gpu if gpu is not None}))

    @property
    def gpu_ranks(self) -> tuple[int, ...]:
        """The ranks that can use NCCL: all with a GPU if each has a whole GPU to itself, else none."""
        ranks = tuple(rank for rank, gpu in enumerate(self.gpu) if gpu is not None)
        whole = {gpu.uuid for gpu in self.gpu if gpu is not None and not gpu.uuid.startswith(SLICE)}
        return ranks if len(whole) == len(ranks) else ()

    def sharing(self, rank: int) -> int:
        """Number of ranks on the GPU of this rank, including itself; 0 on the CPU."""
        own = self.gpu[rank]
        return sum(gpu is not None and own is not None and gpu.uuid == own.uuid for gpu in self.gpu)

    def _have_one_gpu_each(self) -> bool:
        """Whether several ranks of a node have a GPU each, and see no other."""
        computing = [self.peers[rank] for rank in self.gpu_ranks]
        ranks_by_host = Counter(peer.host for peer in computing)
        return max(ranks_by_host.values(), default=1) > 1 and all(len(peer.gpus) == 1 for peer in computing)

    def remark(self) -> str:
        """Warning for the user; "" if there is none."""
        most = max(Counter(gpu.uuid for gpu in self.gpu if gpu is not None).values(), default=1)
        if most == 1:
            return _ONE_GPU_EACH if self._have_one_gpu_each() else ""
        return (
            f"up to {most} ranks share a GPU, each with its part of the memory; without NVIDIA's MPS "
            "(nvidia-cuda-mps-control -d) they take turns: one rank per GPU is fastest"
        )


def place_ranks(peers: Sequence[Peer], runtime: RuntimeConfig) -> GpuPlacement:
    """Chooses the GPU of each rank.

    Ranks are spread evenly over the GPUs that they see. Rank 0 takes no GPU if more ranks would have to share one with
    it, unless `runtime.server` is "shared".

    Raises:
        ConfigError: a GPU was configured or allocated and torch finds none; only some of the computing ranks see a
            GPU; the GPUs are of several models.
    """
    usable = _find_usable_gpus(peers, runtime)
    if runtime.device == "cpu" or not any(usable):
        if runtime.device == "cuda":
            raise ConfigError("runtime.device = 'cuda', but no rank sees a CUDA device; use cpu or auto")
        if runtime.gpus is not None:
            raise ConfigError(
                f"runtime.gpus = {runtime.gpus} with runtime.device = {runtime.device!r}, but no rank sees a GPU that "
                "it may use; leave it null"
            )
        if runtime.device == "auto":
            _refuse_missing_gpus(peers)
        return GpuPlacement(tuple(peers), (None,) * len(peers), False, _count_cpu_slots(peers, runtime))
    computing = range(1, len(peers)) if _should_only_serve(peers, usable, runtime) else range(len(peers))
    if blind := [rank for rank in computing if not usable[rank]]:
        raise ConfigError(
            f"{describe_ranks(blind, peers)} have no GPU, and others have one; results would depend on the ranks: "
            "choose other nodes, or set runtime.device = 'cpu'"
        )
    assigned = _assign_gpus({rank: usable[rank] for rank in computing})
    number = tuple(
        [gpu.uuid for gpu in peer.gpus].index(assigned[rank]) if rank in assigned else None
        for rank, peer in enumerate(peers)
    )
    placement = GpuPlacement(tuple(peers), number, 0 not in computing, len(set(assigned.values())))
    if len(placement.models) > 1 and runtime.mixed_gpus == "refuse":
        raise ConfigError(
            f"the ranks have GPUs of several models ({', '.join(placement.models)}), on which the same numbers may "
            "come out differently; choose nodes of one (--constraint, --gpus=TYPE:N), or set runtime.mixed_gpus = "
            "'allow': results then depend on which rank computes a client"
        )
    return placement


def _refuse_missing_gpus(peers: Sequence[Peer]) -> None:
    """Raise `ConfigError` if GPUs were allocated to a rank and torch finds none: they would be paid for in vain."""
    requested = [rank for rank, peer in enumerate(peers) if peer.requested]
    if requested:
        raise ConfigError(
            f"a GPU was requested ({peers[requested[0]].requested} on {describe_ranks(requested, peers)}; "
            "`--exclusive` asks for whole nodes), but torch finds none; see with nvidia-smi or rocm-smi whether the "
            "driver works, install a torch that is built for it (Intel's GPUs are not used), or set runtime.device = "
            "'cpu'"
        )


def _find_usable_gpus(peers: Sequence[Peer], runtime: RuntimeConfig) -> list[tuple[str, ...]]:
    """Returns [R] the ids of the GPUs that each rank sees among the first `runtime.gpus` of its node.

    The GPUs of a node are in the order in which its lowest rank sees them.
    """
    if runtime.device == "cpu":
        return [()] * len(peers)
    gpus_by_host: dict[str, dict[str, None]] = {}  # the inner dict is an ordered set
    for peer in peers:
        gpus_by_host.setdefault(peer.host, {}).update(dict.fromkeys(gpu.uuid for gpu in peer.gpus))
    for host, gpus in gpus_by_host.items():
        if runtime.gpus is not None and 0 < len(gpus) < runtime.gpus:
            raise ConfigError(f"runtime.gpus = {runtime.gpus}, but {host} has {len(gpus)}; lower it or leave it null")
    allowed = {host: set(list(gpus)[: runtime.gpus]) for host, gpus in gpus_by_host.items()}
    return [tuple(gpu.uuid for gpu in peer.gpus if gpu.uuid in allowed[peer.host]) for peer in peers]


def _should_only_serve(peers: Sequence[Peer], usable: Sequence[tuple[str, ...]], runtime: RuntimeConfig) -> bool:
    """Whether rank 0 computes no clients: it sees no GPU, or a GPU would have more ranks with it."""
    if len(usable) == 1 or not any(usable[1:]):
        return False
    if not usable[0]:
        return True
    host = peers[0].host
    neighbours = {
        rank: gpus for rank, gpus in enumerate(usable) if gpus and (peers[rank].host == host or {*gpus} & {*usable[0]})
    }
    if runtime.server == "shared" or len(neighbours) == 1:
        return False
    with_server = _assign_gpus(neighbours)
    without_server = _assign_gpus({rank: gpus for rank, gpus in neighbours.items() if rank})
    return max(Counter(with_server.values()).values()) > max(Counter(without_server.values()).values())


def _assign_gpus(usable: dict[int, tuple[str, ...]]) -> dict[int, str]:
    """Chooses the GPU of each rank among those that it may use, so that as few ranks as possible share one.

    This is a minimum-cost matching of ranks with slots on GPUs. The n-th slot of a GPU costs n, which evens out loads;
    ties are broken so that lower ranks get the first slots of the GPUs that they see first.
    """
    if not usable:
        return {}
    csgraph: Any = import_module("scipy.sparse.csgraph")  # imported here, because a run on CPUs does not need it
    ranks = sorted(usable)
    sharing = Counter(gpu for gpus in usable.values() for gpu in gpus)
    slots = [(gpu, number) for gpu, num_ranks in sharing.items() for number in range(num_ranks)]
    column = {slot: index for index, slot in enumerate(slots)}
    edges = []
    for row, rank in enumerate(ranks):
        for order, gpu in enumerate(usable[rank]):
            for number in range(sharing[gpu]):
                preference = (number * len(usable[rank]) + order) * (len(ranks) - row)
                edges.append((row, column[gpu, number], number, preference))
    rows, columns, numbers, preferences = np.array(edges).T
    weight = 1.0 + preferences + numbers * (1.0 + len(ranks) * preferences.max())  # 0 would be no edge
    graph = import_module("scipy.sparse").coo_array((weight, (rows, columns)), shape=(len(ranks), len(slots)))
    _, matched = csgraph.min_weight_full_bipartite_matching(graph.tocsr())
    return {rank: slots[slot][0] for rank, slot in zip(ranks, matched.tolist(), strict=True)}


def _count_cpu_slots(peers: Sequence[Peer], runtime: RuntimeConfig) -> int:
    """Number of ranks that can compute at once on all nodes; ranks of a node may see different cores."""
    cores_by_host: dict[str, set[int]] = {}
    for peer in peers:
        cores_by_host.setdefault(peer.host, set()).update(peer.cores)
    return sum(max(len(cores) // runtime.threads, 1) for cores in cores_by_host.values())


def find_device(placement: GpuPlacement, rank: int) -> torch.device:
    number = placement.number[rank]
    return torch.device("cpu") if number is None else torch.device("cuda", number)


def choose_device(runtime: RuntimeConfig) -> torch.device:
    """The device of a process without ranks: its first GPU, or the CPU if it sees none or `runtime.device` says so."""
    on_gpu = runtime.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda", 0) if on_gpu else torch.device("cpu")


def choose_gpus(peers: Sequence[Peer], runtime: RuntimeConfig, training: TrainingConfig) -> GpuPlacement:
    """As `place_ranks`; also raises `ConfigError` for settings that need a GPU."""
    placed = place_ranks(peers, runtime)
    if placed.kind == "cpu":
        check_cpu_settings(training)
    return placed


def check_cpu_settings(training: TrainingConfig) -> None:
    """Raise `ConfigError` for settings that need a GPU."""
    if training.precision == "tf32":
        raise ConfigError("training.precision = 'tf32' needs a CUDA device; use fp32 or bf16 on a CPU")


def limit_memory(placement: GpuPlacement, rank: int, runtime: RuntimeConfig) -> None:
    """Limit the memory of this rank's GPU to its part of `runtime.gpu_memory`, which the GPU's ranks share evenly."""
    number, gpu, sharing = placement.number[rank], placement.gpu[rank], placement.sharing(rank)
    if number is None or gpu is None or (share := runtime.gpu_memory / sharing) == 1:
        return
    share -= CUDA_CONTEXT_BYTES / gpu.memory  # PyTorch's allocator does not count it
    if share <= 0:
        raise ConfigError(
            f"{sharing} ranks share a GPU of {format_bytes(gpu.memory)}, of which the run may take "
            f"{runtime.gpu_memory:.0%}, and each takes {format_bytes(CUDA_CONTEXT_BYTES)} for CUDA alone; start fewer "
            "ranks"
        )
    torch.cuda.set_per_process_memory_fraction(share, torch.device("cuda", number))


def choose_executor(
    runtime: RuntimeConfig, tasks: Sequence[Task], clients: int, participants: int, on_gpu: bool
) -> RuntimeConfig:
    """Returns the settings with `executor` and `lanes` decided, independently of ranks.

    Args:
        clients: N.
        participants: P.
        on_gpu: whether clients are computed on GPUs, on whatever rank.
    """
    architectures = [task.architecture for task in tasks]
    normed = [architecture.name for architecture in architectures if architecture.has_batch_norm]
    executor = runtime.executor
    if executor == "auto":
        # On a CPU, batching makes matrix products faster and convolutions slower.
        batchable = not normed and (on_gpu or not any(a.has_convolution for a in architectures))
        batchable = batchable and all(architecture.suits_lanes for architecture in architectures)
        executor = "lanes" if batchable else "loop"
    if executor == "lanes" and normed:
        raise ConfigError(
            f"runtime.executor = 'lanes' with model {normed[0]}, whose buffers training changes, as batch norm does: "
            "they would follow the padding of batches; set runtime.executor: loop (of a run that is there in a `pflmpi "
            "fork`), or model.norm: group for a module of a new run"
        )
    if executor == "loop":
        return runtime.model_copy(update={"executor": executor, "lanes": 1})
    in_cache = _CPU_CACHE // max(tree.num_bytes(task.like()) for task in tasks)
    together = MAX_TOGETHER if on_gpu else min(max(in_cache, _MIN_TOGETHER), MAX_TOGETHER)
    lanes = runtime.lanes or choose_lanes(clients, participants, together)
    return runtime.model_copy(update={"executor": executor, "lanes": lanes})


def choose_lanes(clients: int, participants: int, together: int) -> int:
    """Returns the clients per group, of which at most about `together` take part in a round.

    The number of groups is a power of two, at least 2, so that ranks have equal shares: of three groups, one of two
    ranks would have two.

    >>> choose_lanes(20, 20, together=32), choose_lanes(100, 20, together=9), choose_lanes(10_000, 20, together=9)
    (10, 25, 2500)
    >>> choose_lanes(1000, 100, together=32), choose_lanes(3, 1, together=32), choose_lanes(1, 1, together=4)
    (250, 2, 1)
    """
    groups = max(2, 1 << (-(-participants // together) - 1).bit_length())
    return -(-clients // groups)


def fix_kernels(device: torch.device, runtime: RuntimeConfig, training: TrainingConfig) -> None:
    """Fix thread count and kernels of this process, so that the same input gives the same bits."""
    torch.set_num_threads(runtime.threads)
    _keep_freed_memory()
    with contextlib.suppress(OSError):
        # Otherwise torch creates a folder for its compiler, which is not used here, under a predictable name in the
        # shared folder for temporary files, and fails if another user has created a file of that name.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(machine.private_folder(runtime.cache) / "torch"))
    if device.type != "cuda":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is not deterministic without
    torch.cuda.set_device(device)
    torch.set_deterministic_debug_mode("error")  # `use_deterministic_algorithms` imports torch's compiler: 2 to 4 s
    # No result depends on uninitialised memory, and filling costs an operation for each empty tensor.
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    # Each is set: "none" would follow a user's `torch.backends.fp32_precision`, and `allow_tf32` does not set them all.
    backends: Any = torch.backends  # it does not declare these attributes
    for kernels in (backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul):
        kernels.fp32_precision = "tf32" if training.precision == "tf32" else "ieee"


def _keep_freed_memory() -> None:
    """Make the C library keep freed memory: fresh pages for activations cost a CNN up to a quarter of its time."""
    try:
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, 1 << 30)
        library.mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
    except (OSError, AttributeError):
        _log.debug("this C library has no mallopt; training is somewhat slower")


@dataclass(frozen=True)
class GpuMessages:
    """How large messages travel between the GPUs of a run."""

    ranks: tuple[int, ...]  # that exchange them from GPU to GPU; empty if they go through the host
    text: str  # the route and the reason for it; "" without GPUs
    nccl: bool = False  # whether NCCL moves them

    def memory(self, rank: int, on_node: int, parts: bool) -> float:
        """Bytes that NCCL itself takes of a rank's GPU; unknown for MPI, which counts as 0.

        Args:
            on_node: number of ranks on the node.
            parts: whether ranks also send each other parts, instead of only broadcasts and sums.
        """
        if not self.nccl or rank not in self.ranks:
            return 0.0
        return _NCCL_COLLECTIVE + (_NCCL_PEER * (on_node - 1) if parts else 0.0)


def gpu_messages(placed: GpuPlacement, transport: str, between_gpus: Literal["auto", "host"]) -> GpuMessages:
    """Chooses the route of large messages for a placement and a transport's name."""
    computing = tuple(rank for rank, gpu in enumerate(placed.gpu) if gpu is not None)
    if not computing or len(placed.peers) == 1:
        return GpuMessages((), "")
    if between_gpus == "host":
        library = "MPI" if transport == "mpi" else "gloo"
        return GpuMessages((), f"{library}, through the host: runtime.between_gpus = 'host'")
    if transport == "mpi":
        return _choose_mpi_route(placed, computing)
    library = machine.gpu_platform()[1]
    if len(placed.gpu_ranks) > 1:
        server = "" if 0 in computing else f", and gloo between rank 0 and rank {computing[0]}, which stands for it"
        return GpuMessages(
            placed.gpu_ranks, f"{library} from GPU to GPU, on {format_ranks(computing)}{server}", nccl=True
        )
    why = "only one rank has a GPU" if len(computing) == 1 else f"{library} needs a whole GPU for each rank"
    return GpuMessages((), f"gloo, through the host: {why}")


def _choose_mpi_route(placed: GpuPlacement, computing: tuple[int, ...]) -> GpuMessages:
    """All ranks use the host if the library of any rank, even of a server without a GPU, is not known to do better."""
    for answer, what in ((False, "cannot move"), (None, "does not say that it can move")):
        unable = [rank for rank, peer in enumerate(placed.peers) if peer.device_buffers is answer]
        if unable:
            who = "every rank" if len(unable) == len(placed.peers) else describe_ranks(unable, placed.peers)
            return GpuMessages((), f"MPI, through the host: the library of {who} {what} memory of a GPU")
    return GpuMessages(computing, f"MPI from GPU to GPU, on {format_ranks(computing)}")
