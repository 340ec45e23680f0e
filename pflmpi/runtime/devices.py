"""The device, the executor, the threads and the kernels of a rank."""

import ctypes
import logging
import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from pflmpi.errors import ConfigError
from pflmpi.learning.task import Task
from pflmpi.learning.training import TrainingConfig
from pflmpi.runtime.config import RuntimeConfig
from pflmpi.transports.detect import Launch
from pflmpi.transports.peers import Peer, names

_LANES = 32  # clients in one call, where their number is not configured
_log = logging.getLogger(__name__)


def choose(runtime: RuntimeConfig, training: TrainingConfig, launch: Launch) -> torch.device:
    """The device of this rank; more ranks than GPUs share them round robin.

    Where rank 0 is one too many for the GPUs of its node, it serves from the CPU and leaves them to the others.

    Raises:
        ConfigError: CUDA asked for where there is none, more GPUs asked for than there are, tf32 on a CPU.
    """
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if runtime.device == "cuda" and there == 0:
        raise ConfigError("runtime.device = 'cuda', but this machine has no CUDA device; use cpu or auto")
    if runtime.gpus is not None and runtime.gpus > there:
        raise ConfigError(f"runtime.gpus = {runtime.gpus}, but this machine has {there}; lower it or leave it null")
    number = None if runtime.device == "cpu" else gpu_of(launch, runtime.gpus or there, runtime.server != "shared")
    if number is None:
        if training.precision == "tf32" and (runtime.device == "cpu" or there == 0):
            raise ConfigError("training.precision = 'tf32' needs a CUDA device; use fp32 or bf16 on a CPU")
        return torch.device("cpu")
    usable = runtime.gpus or there
    if not launch.bound and launch.local_size > usable + 1 and launch.local_rank == 0:
        _log.warning("%d ranks share %d GPUs round robin", launch.local_size, usable)
    return torch.device("cuda", number)


def gpu_of(launch: Launch, gpus: int, server_apart: bool) -> int | None:
    """The number of this rank's GPU among those that it sees; None for the CPU.

    Args:
        launch: who this rank is.
        gpus: how many this rank sees and may use.
        server_apart: rank 0 may do without one.

    >>> ranks = [Launch("mpi", rank, 5, rank, 5) for rank in range(5)]
    >>> [gpu_of(rank, 4, True) for rank in ranks], [gpu_of(rank, 4, False) for rank in ranks]
    ([None, 0, 1, 2, 3], [0, 1, 2, 3, 0])
    """
    if gpus == 0:
        return None
    if launch.bound:  # Slurm shows it its own alone
        return 0
    if server_apart and launch.beside_server and launch.local_size == gpus + 1 and launch.size > 1:
        return None if launch.rank == 0 else launch.local_rank - 1
    return launch.local_rank % gpus


def limit_memory(device: torch.device, runtime: RuntimeConfig, launch: Launch) -> None:
    """Let this rank take no more of its GPU than its part of `runtime.gpu_memory`, which its ranks have together."""
    if device.type != "cuda" or runtime.gpu_memory == 1:
        return
    sharing = ranks_on(launch, runtime.gpus or torch.cuda.device_count(), runtime.server != "shared")
    torch.cuda.set_per_process_memory_fraction(runtime.gpu_memory / sharing, device)


def ranks_on(launch: Launch, gpus: int, server_apart: bool) -> int:
    """How many ranks of this node, this one among them, have the same GPU; for arguments see `gpu_of`.

    >>> [ranks_on(Launch("mpi", rank, 5, rank, 5), 2, True) for rank in range(5)]
    [3, 2, 3, 2, 3]
    """
    if launch.bound:
        return 1
    first = launch.rank - launch.local_rank
    others = [replace(launch, rank=first + local, local_rank=local) for local in range(launch.local_size)]
    mine = gpu_of(launch, gpus, server_apart)
    return sum(gpu_of(other, gpus, server_apart) == mine for other in others)


def gpu_of_its_own(device: torch.device, runtime: RuntimeConfig, launch: Launch) -> bool:
    """Whether every rank of this node has a GPU to itself."""
    if device.type != "cuda":
        return False
    return launch.bound or launch.local_size <= (runtime.gpus or torch.cuda.device_count())


def slots(runtime: RuntimeConfig, cores: int) -> int:
    """How many ranks can compute at once on this node."""
    if runtime.device != "cpu" and torch.cuda.is_available():
        return runtime.gpus or torch.cuda.device_count()
    return max(cores // runtime.threads, 1)


def for_peers(runtime: RuntimeConfig, peers: Sequence[Peer]) -> RuntimeConfig:
    """The settings for these ranks: rank 0 computes no clients if it alone has no GPU.

    Raises:
        ConfigError: some other ranks have one and some have not, and would compute other bits.
    """
    kinds = {peer.device for peer in peers[1:]}
    if len(kinds) > 1:
        without = names([rank for rank, peer in enumerate(peers) if rank and peer.device == "cpu"], peers)
        raise ConfigError(
            f"{without} have no GPU, and others have one; results would depend on the ranks: choose other nodes, "
            "or set runtime.device = 'cpu'"
        )
    if kinds and peers[0].device not in kinds:
        return runtime.model_copy(update={"server": "dedicated"})
    return runtime


def choose_executor(runtime: RuntimeConfig, tasks: Sequence[Task], clients: int) -> RuntimeConfig:
    """The settings with `executor` and `lanes` decided, from what does not depend on ranks.

    Args:
        tasks: one per cohort.
        clients: N.

    Raises:
        ConfigError: lanes asked for with a model that cannot be batched.
    """
    architectures = [task.architecture for task in tasks]
    batch_norm = any(architecture.has_batch_norm for architecture in architectures)
    if runtime.executor == "lanes" and batch_norm:
        raise ConfigError(
            "runtime.executor = 'lanes': batch norm updates its statistics in place, which cannot be batched "
            "over clients; use loop or auto"
        )
    executor = runtime.executor
    if executor == "auto":
        on_gpu = tasks[0].device.type == "cuda"
        # On a CPU a batched convolution is slower than one after another; a matrix product is faster.
        batchable = not batch_norm and (on_gpu or not any(a.has_convolution for a in architectures))
        executor = "lanes" if batchable else "loop"
    # Two groups at least, so that two ranks can share.
    lanes = 1 if executor == "loop" else runtime.lanes or -(-clients // max(2, -(-clients // _LANES)))
    return runtime.model_copy(update={"executor": executor, "lanes": lanes})


def fix_kernels(device: torch.device, runtime: RuntimeConfig, training: TrainingConfig) -> None:
    """Fix thread count and kernels of this process, so that the same input gives the same bits."""
    torch.set_num_threads(runtime.threads)
    _keep_freed_memory()
    if device.type != "cuda":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is not deterministic without
    torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    tf32 = training.precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32


def _keep_freed_memory() -> None:
    """Let the C library keep freed memory: fresh pages for every activation cost a CNN up to a quarter of its time."""
    try:
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, 1 << 30)
        library.mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
    except (OSError, AttributeError):
        _log.debug("this C library has no mallopt; training is somewhat slower")


_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of glibc's malloc.h
