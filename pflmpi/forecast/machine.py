"""What this machine is: its processor, its memory, the libraries that compute."""

import os
import platform
from pathlib import Path

import torch

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def facts(device: torch.device) -> dict[str, str]:
    """Return what seconds depend on besides the work: "cpu", "device" and "torch"."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"cpu": _processor(), "device": kind, "torch": str(torch.__version__)}


def memory() -> int:
    """Return the bytes of memory of this node, or fewer where this job may use fewer."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _LIMITS:
        try:
            there = min(there, int(Path(path).read_text()))
        except (OSError, ValueError):  # no such limit: "max", or no file
            continue
    return there


def available() -> int:
    """Return the bytes of memory that are not in use, as far as the system says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return min(next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), memory())
    except (OSError, StopIteration):
        return memory()


def gpu_memory() -> int | None:
    """Return the bytes of memory of this machine's first GPU, None without one."""
    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
