"""The device, the threads and the kernels of a rank."""

import ctypes
import logging
import os

import torch

from pflmpi.errors import ConfigError
from pflmpi.runtime.config import RuntimeConfig
from pflmpi.training import TrainingConfig

_log = logging.getLogger(__name__)


def choose(runtime: RuntimeConfig, training: TrainingConfig, local_rank: int, local_size: int) -> torch.device:
    """Return the device of this rank; more ranks than GPUs share them round robin.

    Raises:
        ConfigError: CUDA asked for where there is none, more GPUs asked for than there are, tf32 on a CPU.
    """
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if runtime.device == "cuda" and there == 0:
        raise ConfigError("runtime.device = 'cuda', but this machine has no CUDA device; use cpu or auto")
    if runtime.gpus is not None and runtime.gpus > there:
        raise ConfigError(f"runtime.gpus = {runtime.gpus}, but this machine has {there}; lower it or leave it null")
    if runtime.device == "cpu" or there == 0:
        if training.precision == "tf32":
            raise ConfigError("training.precision = 'tf32' needs a CUDA device; use fp32 or bf16 on a CPU")
        return torch.device("cpu")
    usable = runtime.gpus or there
    if local_size > usable and local_rank == 0:
        _log.warning("%d ranks share %d GPUs round robin", local_size, usable)
    return torch.device("cuda", local_rank % usable)


def gpu_of_its_own(device: torch.device, runtime: RuntimeConfig, local_size: int) -> bool:
    """Return whether every rank of this node has a GPU to itself."""
    return device.type == "cuda" and local_size <= (runtime.gpus or torch.cuda.device_count())


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
