"""This machine and what of it this process may use: cores, memory, temporary space, processor, GPU; its processes."""

import contextlib
import os
import platform
import re
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pflmpi.errors import ConfigError, RunError
from pflmpi.text import first_line

if TYPE_CHECKING:
    import torch

# Memory controllers of control groups: version 1 calls them "memory", version 2 has no name for them. For each: where
# the groups are, the files with limit and use, and the line of memory.stat with what the kernel gives back on demand.
_CONTROLLERS = {
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
}
_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")


class Space(NamedTuple):
    """Bytes in all, and bytes that are free."""

    total: int
    free: int


SLICE = "MIG-"  # how the ids of slices of a GPU begin
GPU_REMEDY = "see with nvidia-smi or rocm-smi whether it is free and its driver fits, or set runtime.device = 'cpu'"
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_NO_GPU = ("", "-1", "NoDevFiles")  # values of these that hide all GPUs


class Gpu(NamedTuple):
    """A GPU, or a slice of one, as a process sees it."""

    uuid: str  # the same for every process that sees it
    model: str
    memory: int  # bytes


def cores() -> tuple[int, ...]:
    """Numbers of the cores that this process may use, ascending."""
    return tuple(sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def num_cores(environ: Mapping[str, str]) -> int:
    """Number of cores that this process may use: those it is bound to, or fewer that Slurm gives it without binding."""
    given = (environ.get(name, "") for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"))
    return min([len(cores()), *(int(number) for number in given if number.isdecimal() and int(number))])


def memory(root: Path = Path("/")) -> Space:
    """Memory that this process may use: the host's, or its control group's where that has less.

    Slurm with `--mem`, and containers, confine a process to a control group. Where the system does not say what is
    free, all of it is taken to be.

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
    """Bytes of this process in a line of /proc/self/status, such as VmHWM, the most it ever had; 0 without one."""
    try:
        with open("/proc/self/status", "rb", buffering=0) as file:
            match = re.search(rb"^%s:\s+(\d+) kB$" % name.encode(), file.read(), re.MULTILINE)
    except OSError:
        return 0
    return 1024 * int(match[1]) if match else 0


def expanded(path: str | os.PathLike[str], folder: Path = Path()) -> Path:
    """The path with `~` and `$NAME` expanded as by a shell, below a folder where it is relative.

    A name that exists as it stands is taken as it is. Raises `ConfigError` for a variable or user that is unknown.
    """
    place = Path(folder, path)
    if any(("$" in part.name or part.name[:1] == "~") and os.path.lexists(part) for part in (place, *place.parents)):
        return place
    text = os.path.expandvars(path)
    if unset := _VARIABLE.search(text):
        name = unset.group().strip("${}")
        raise ConfigError(f"{os.fspath(path)}: the variable {name} is not set; set it, or write the path out")
    try:
        return Path(folder, Path(text).expanduser())
    except RuntimeError as error:  # ~NAME of nobody
        raise ConfigError(f"{text}: {error}") from error


def nearest_existing(folder: Path, exists: Callable[[Path], bool] = os.path.exists) -> Path:
    """The absolute folder, or its nearest parent that exists; with `os.path.lexists` a link to nothing does."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if exists(place))


def private_folder(named: str | None = None) -> Path:
    """The folder for caches, made with mode 0700: `pflmpi-UID` among those for temporary files, unless one is named.

    Raises:
        ConfigError: it is a link, another user's, or others can write to it.
        OSError: it cannot be made.
    """
    folder = expanded(named) if named else Path(tempfile.gettempdir()) / f"pflmpi-{os.getuid()}"
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
    """The GPUs that torch shows this process, in its order; asking starts the driver.

    Args:
        visible: CUDA_VISIBLE_DEVICES, which alone names a slice of a GPU (MIG).

    Raises:
        RunError: the driver fails.
    """
    import torch

    if not torch.cuda.is_available():
        return ()
    try:
        return tuple(_gpus(visible))
    except RuntimeError as error:  # what torch raises for a GPU that is taken, lost, or too new for it
        raise RunError(f"a GPU cannot be used ({first_line(error)}); {GPU_REMEDY}") from error


def requested_gpus(environ: Mapping[str, str]) -> str:
    """The variable by which a user or Slurm has given this process GPUs, with its value; "" if none has.

    >>> requested_gpus({"SLURM_STEP_GPUS": "0,1"})
    "SLURM_STEP_GPUS = '0,1'"
    """
    name = next((name for name in _VISIBLE if name in environ), None)
    if name is not None:  # it counts alone: Slurm's variables are of the job, a step of which may have no GPU
        return "" if environ[name] in _NO_GPU else f"{name} = {environ[name]!r}"
    # Not SLURM_JOB_GPUS: `--exclusive` sets it on a node with GPUs, and the steps of the job have none.
    none = {"SLURM_STEP_GPUS": "", "SLURM_GPUS_ON_NODE": "0"}  # the last one is a count
    given = (name for name in none if environ.get(name, "") not in ("", none[name]))
    return next((f"{name} = {environ[name]!r}" for name in given), "")


def gpu_platform() -> tuple[str, str]:
    """What torch computes on GPUs with ("CUDA 13.0", or "HIP 6.4" for AMD's; "" without), and what connects them."""
    import torch

    if torch.version.hip:
        return f"HIP {torch.version.hip}", "RCCL"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "", "NCCL"


def device_name(device: "torch.device") -> str:
    """Name of a GPU, or of the processor."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()


def _gpus(visible: str | None) -> Iterator[Gpu]:
    import torch

    slices = [name.strip() for name in (visible or "").split(",") if name.strip().startswith(SLICE)]
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        uuid = slices[number] if number < len(slices) else str(about.uuid)
        yield Gpu(uuid, about.name, int(about.total_memory))


def _limit(folder: Path, limit: str, used: str, reclaimable: str) -> tuple[int, int]:
    """Limit of a control group, and how much of it is in use for good; 1 << 63 and 0 without a limit."""
    try:
        files = (folder / "memory.stat").read_text().split()
        spare = int(dict(zip(files[::2], files[1::2], strict=True)).get(reclaimable, 0))
        return int((folder / limit).read_text()), max(int((folder / used).read_text()) - spare, 0)
    except (OSError, ValueError):  # the text for no limit is "max"
        return 1 << 63, 0


@cache  # `plan` has a peer for each of thousands of ranks
def system() -> str:
    """Boot and process namespace of this process, within which numbers of processes mean something; "" if unknown.

    Containers of one node may have one host name, and a namespace of processes each.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


_UNKNOWN = -1  # start of a process where the system does not tell
_ENDED = ("Z", "X")  # states of a process that has ended and has not been reaped


def start_of(process: int) -> int:
    """Start of a process of this host in clock ticks after the boot; 0 once it has ended, -1 where that is unknown."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return _UNKNOWN
    return 0 if fields[0] in _ENDED else int(fields[19])


def has_ended(process: int, started: int | None = None) -> bool:
    """Whether a process of this host has ended: none has its number, or one that `started` at another time."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # of another user
    now = start_of(process)
    return now == 0 if started is None else now not in (started, _UNKNOWN)
