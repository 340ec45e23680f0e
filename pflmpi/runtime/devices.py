"""The device, the executor, the threads and the kernels of a rank."""

import contextlib
import ctypes
import logging
import os
from collections.abc import Sequence

import torch
from torch.utils import deterministic

from pflmpi import machine, tree
from pflmpi.errors import ConfigError
from pflmpi.learning.task import Task
from pflmpi.learning.training import TrainingConfig
from pflmpi.runtime.config import RuntimeConfig
from pflmpi.runtime.gpu_placement import GpuPlacement, place_ranks
from pflmpi.runtime.placement import MOST_TOGETHER
from pflmpi.transports.peers import Peer

_LEAST_TOGETHER = 4  # participants in one call, where their number is not configured
_CACHE = 4 * 2**20  # bytes of their models on a CPU: ten MLPs of 100 hidden units in one call beat twice five
_log = logging.getLogger(__name__)


def device_of(placement: GpuPlacement, rank: int) -> torch.device:
    """The device of a rank."""
    number = placement.number[rank]
    return torch.device("cpu") if number is None else torch.device("cuda", number)


def own_device(runtime: RuntimeConfig) -> torch.device:
    """The device of a process that is no rank: the first GPU that it sees, unless the run is to use none."""
    on_gpu = runtime.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda", 0) if on_gpu else torch.device("cpu")


def place(peers: Sequence[Peer], runtime: RuntimeConfig, training: TrainingConfig) -> GpuPlacement:
    """The GPU of each rank; raises `ConfigError` as `place_ranks`, and for what only a GPU can do."""
    placed = place_ranks(peers, runtime)
    if placed.kind == "cpu":
        refuse_on_cpu(training)
    return placed


def refuse_on_cpu(training: TrainingConfig) -> None:
    """Raise `ConfigError` for what only a GPU can do."""
    if training.precision == "tf32":
        raise ConfigError("training.precision = 'tf32' needs a CUDA device; use fp32 or bf16 on a CPU")


def limit_memory(placement: GpuPlacement, rank: int, runtime: RuntimeConfig) -> None:
    """Let this rank take no more of its GPU than its part of `runtime.gpu_memory`, which its ranks have together."""
    share = runtime.gpu_memory / max(placement.sharing(rank), 1)
    number = placement.number[rank]
    if number is not None and share < 1:
        torch.cuda.set_per_process_memory_fraction(share, torch.device("cuda", number))


def choose_executor(
    runtime: RuntimeConfig, tasks: Sequence[Task], clients: int, participants: int, on_gpu: bool
) -> RuntimeConfig:
    """The settings with `executor` and `lanes` decided, from what does not depend on ranks.

    Args:
        tasks: one per cohort.
        clients: N.
        participants: P.
        on_gpu: clients are computed on GPUs, wherever this rank is.
    """
    architectures = [task.architecture for task in tasks]
    batch_norm = any(architecture.has_batch_norm for architecture in architectures)
    executor = runtime.executor
    if executor == "auto":
        # On a CPU a batched convolution is slower than one after another; a matrix product is faster. Lanes of models
        # with batch norm have not been timed on a GPU.
        batchable = not batch_norm and (on_gpu or not any(a.has_convolution for a in architectures))
        batchable = batchable and all(architecture.suits_lanes for architecture in architectures)
        executor = "lanes" if batchable else "loop"
    if executor == "loop":
        return runtime.model_copy(update={"executor": executor, "lanes": 1})
    in_cache = _CACHE // max(tree.num_bytes(task.like()) for task in tasks)
    together = MOST_TOGETHER if on_gpu else min(max(in_cache, _LEAST_TOGETHER), MOST_TOGETHER)
    lanes = runtime.lanes or choose_lanes(clients, participants, together)
    return runtime.model_copy(update={"executor": executor, "lanes": lanes})


def choose_lanes(clients: int, participants: int, together: int) -> int:
    """Clients in one group, of which at most about `together` take part in a round.

    The number of groups is a power of two, and two at least, so that ranks have equal shares: of three groups, one of
    two ranks would have two.

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
        # For its compiler, which nothing here uses, torch otherwise makes a folder with a name that all users know in
        # the one for temporary files, and fails where somebody has made a file of that name first.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(machine.private_folder(runtime.cache) / "torch"))
    if device.type != "cuda":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is not deterministic without
    torch.cuda.set_device(device)
    torch.set_deterministic_debug_mode("error")  # `use_deterministic_algorithms` imports torch's compiler: 2 to 4 s
    # No result depends on it, and every empty tensor would be filled by an operation of its own.
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
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
