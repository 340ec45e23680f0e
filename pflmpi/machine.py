"""This machine: the cores, memory and GPUs that this process may use; processor, paths and processes."""

import contextlib
import os
import platform
import re
import stat
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pflmpi.errors import ConfigError, RunError
from pflmpi.text import first_line

if TYPE_CHECKING:
    import torch

# Memory controllers of cgroups: "memory" in version 1, "" in version 2. For each: the mount, the files with limit and
# use, and the line of memory.stat with the page cache that the kernel can reclaim.
_CONTROLLERS = {
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
}
_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")


class Space(NamedTuple):
    """Bytes in all, and bytes that are free."""

    total: int
    free: int


SLICE = "MIG-"  # prefix of the ids of MIG slices
GPU_REMEDY = "see with nvidia-smi or rocm-smi whether it is free and its driver fits, or set runtime.device = 'cpu'"
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_NO_GPU = ("", "-1", "NoDevFiles")  # values of these that hide all GPUs


class Gpu(NamedTuple):
    """A GPU, or a slice of one, as a process sees it."""

    uuid: str  # the same in every process
    model: str
    memory: int  # bytes


def cores() -> tuple[int, ...]:
    """Ids of the cores that this process may use, ascending."""
    return tuple(sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def num_cores(environ: Mapping[str, str]) -> int:
    """Number of cores that this process may use: those it is bound to, or fewer if Slurm allocated fewer."""
    allocated = (environ.get(name, "") for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"))
    return min([len(cores()), *(int(number) for number in allocated if number.isdecimal() and int(number))])


def memory(root: Path = Path("/")) -> Space:
    """Memory that this process may use: the host's, or less if its cgroup has less, as under Slurm or in a container.

    Where the system does not tell what is free, all of it counts as free.

    Args:
        root: where /proc and /sys are.
    """
    try:
        lines = dict(re.findall(r"^(\w+):\s+(\d+) kB$", (root / "proc/meminfo").read_text(), re.MULTILINE))
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Space(total, total)
    total, free = 1024 * int(lines["MemTotal"]), 1024 * int(lines["MemAvailable"])
    for line in groups:
        _, controllers, path = line.split(":", 2)
        for controller in set(controllers.split(",")) & _CONTROLLERS.keys():
            mount, *files = _CONTROLLERS[controller]
            parts = Path(path.lstrip("/")).parts
            for depth in range(len(parts) + 1):  # the groups around it limit it too
                limit, used = _limit((root / mount).joinpath(*parts[:depth]), *files)
                total, free = min(total, limit), min(free, limit - used)
    return Space(total, max(free, 0))


def own_memory(name: str) -> int:
    """Bytes in a line of /proc/self/status, such as VmHWM, the peak resident memory; 0 if there is no such line."""
    try:
        with open("/proc/self/status", "rb", buffering=0) as file:
            match = re.search(rb"^%s:\s+(\d+) kB$" % name.encode(), file.read(), re.MULTILINE)
    except OSError:
        return 0
    return 1024 * int(match[1]) if match else 0


def expand_path(path: str | os.PathLike[str], folder: Path = Path()) -> Path:
    """Expand `~` and `$NAME` in a path as a shell does; a relative path is relative to `folder`.

    A path that exists literally is not expanded. Raises `ConfigError` for an unknown variable or user.
    """
    literal = Path(folder, path)
    if any(("$" in p.name or p.name[:1] == "~") and os.path.lexists(p) for p in (literal, *literal.parents)):
        return literal
    text = os.path.expandvars(path)
    if unset := _VARIABLE.search(text):
        name = unset.group().strip("${}")
        raise ConfigError(f"{os.fspath(path)}: the variable {name} is not set; set it, or write the path out")
    try:
        return Path(folder, Path(text).expanduser())
    except RuntimeError as error:  # ~NAME of an unknown user
        raise ConfigError(f"{text}: {error}") from error


def nearest_existing(folder: Path, exists: Callable[[Path], bool] = os.path.exists) -> Path:
    """The absolute folder, or its nearest parent that exists; `os.path.lexists` counts dangling links as existing."""
    folder = folder.absolute()
    return next(parent for parent in (folder, *folder.parents) if exists(parent))


def private_folder(named: str | None = None) -> Path:
    """Make the folder for caches with mode 0700: the one named, or `pflmpi-UID` in the folder for temporary files.

    Raises:
        ConfigError: it is a link, another user's, or others can write to it.
        OSError: it cannot be made.
    """
    folder = expand_path(named) if named else Path(tempfile.gettempdir()) / f"pflmpi-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ConfigError(
            f"the cache folder {folder} is a link, another user's, or open to others; name another by runtime.cache"
        )
    return folder


def processor() -> str:
    """Name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def gpus(visible: str | None) -> tuple[Gpu, ...]:
    """The GPUs that torch shows this process, in torch's order; this initialises the driver.

    Args:
        visible: CUDA_VISIBLE_DEVICES; torch does not tell the id of a MIG slice.

    Raises:
        RunError: the driver fails.
    """
    import torch

    if not torch.cuda.is_available():
        return ()
    slices = [name.strip() for name in (visible or "").split(",") if name.strip().startswith(SLICE)]
    result = []
    try:
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            uuid = slices[number] if number < len(slices) else str(properties.uuid)
            result.append(Gpu(uuid, properties.name, int(properties.total_memory)))
    except RuntimeError as error:  # what torch raises for a GPU that is taken, lost, or too new for it
        raise RunError(f"a GPU cannot be used ({first_line(error)}); {GPU_REMEDY}") from error
    return tuple(result)


def requested_gpus(environ: Mapping[str, str]) -> str:
    """The environment variable by which a user or Slurm assigns GPUs to this process, with its value; "" for none.

    >>> requested_gpus({"SLURM_STEP_GPUS": "0,1"})
    "SLURM_STEP_GPUS = '0,1'"
    """
    name = next((name for name in _VISIBLE if name in environ), None)
    if name is not None:  # only this counts: Slurm's variables are of the job, a step of which may have no GPU
        return "" if environ[name] in _NO_GPU else f"{name} = {environ[name]!r}"
    # Not SLURM_JOB_GPUS: `--exclusive` sets it on a node with GPUs, and the steps of the job have none.
    if ids := environ.get("SLURM_STEP_GPUS", ""):
        return f"SLURM_STEP_GPUS = {ids!r}"
    count = environ.get("SLURM_GPUS_ON_NODE", "")
    return f"SLURM_GPUS_ON_NODE = {count!r}" if count not in ("", "0") else ""


def gpu_platform() -> tuple[str, str]:
    """Torch's GPU platform ("CUDA 13.0", or "HIP 6.4" for AMD; "" without), and its collective library."""
    import torch

    if torch.version.hip:
        return f"HIP {torch.version.hip}", "RCCL"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "", "NCCL"


def device_name(device: "torch.device") -> str:
    """Name of a GPU, or of the processor."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()


def _limit(folder: Path, limit: str, used: str, reclaimable: str) -> tuple[int, int]:
    """Limit of a cgroup, and its use without reclaimable page cache, in bytes; 1 << 63 and 0 without a limit."""
    try:
        words = (folder / "memory.stat").read_text().split()
        cache_bytes = int(dict(zip(words[::2], words[1::2], strict=True)).get(reclaimable, 0))
        return int((folder / limit).read_text()), max(int((folder / used).read_text()) - cache_bytes, 0)
    except (OSError, ValueError):  # the text for no limit is "max"
        return 1 << 63, 0


@cache  # `plan` calls it for each of thousands of ranks
def identify_system() -> str:
    """Boot id and process namespace, within which process ids are comparable; "" if unknown.

    The host name does not suffice: containers of a node may share it, and have a process namespace each.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


_UNKNOWN = -1  # start of a process where there is no /proc
_ENDED = ("Z", "X")  # states of a process that has ended and has not been reaped


def read_start(process: int) -> int:
    """Start of a process of this host in clock ticks after the boot; 0 once it has ended, -1 if unknown."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return _UNKNOWN
    return 0 if fields[0] in _ENDED else int(fields[19])


def has_ended(process: int, started: int | None = None) -> bool:
    """Whether a process of this host has ended, also if its id now belongs to one that `started` at another time."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # of another user
    now = read_start(process)
    return now == 0 if started is None else now not in (started, _UNKNOWN)
