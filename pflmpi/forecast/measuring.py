"""Seconds and memory of a call in this process, and measurements that are kept as small files."""

import contextlib
import ctypes
import hashlib
import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter

from pflmpi import atomic

T = TypeVar("T")
Facts = Mapping[str, Any]

_REPEATS = 3
_LONG = 1.0  # seconds; a longer call is made once


@dataclass(frozen=True)
class Cost:
    """Cost of a call.

    Attributes:
        seconds: median of a few calls, after one that warms up.
        memory: bytes of the host, besides those in use before.
        device: likewise bytes of the GPU; 0 on a CPU.
    """

    seconds: float
    memory: float
    device: float


def measure(call: Callable[[], object], device: torch.device) -> Cost:
    """Cost of a call, made a few times."""
    host, on_gpu = _reset_peaks(device)
    first = _seconds(call, device)
    times = [_seconds(call, device) for _ in range(_REPEATS if first < _LONG else 0)]
    peak = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
    return Cost(statistics.median(times or [first]), max(_status("VmHWM") - host, 0), peak - on_gpu)


def resident() -> int:
    """Bytes of memory that this process has; where the system does not say, the most it ever had."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # free memory goes back to the system
    return _status("VmRSS") or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def resident_files() -> int:
    """Bytes of it that belong to files, which processes of a node share; 0 where the system does not say."""
    return _status("RssFile")


@dataclass(frozen=True)
class Cache:
    """Measurements in FOLDER/WORK-MACHINE.json, by what was measured and the machine on which.

    Attributes:
        folder: of the files.
        renew: measure again what is stored.
    """

    folder: Path
    renew: bool = False

    def find(self, kind: type[T], work: Facts, machine: Facts) -> T | None:
        """Stored measurement of some work on a machine; None if there is none, or it is damaged."""
        found = None if self.renew else _read(kind, self.folder / _name(work, machine))
        return found and found[0]

    def find_on_gpu(self, kind: type[T], work: Facts) -> tuple[T, Facts] | None:
        """Newest stored measurement of some work on the GPU of any machine, and that machine."""
        paths = [] if self.renew else sorted(self.folder.glob(f"{_key(work)}-*.json"), key=os.path.getmtime)
        found = [one for one in (_read(kind, path) for path in paths) if one and one[1]["device"] != "cpu"]
        return found[-1] if found else None

    def keep(self, value: object, work: Facts, machine: Facts) -> list[str]:
        """Store a measurement, a dataclass; a remark if that is not possible."""
        content = {"work": work, "machine": machine, "numbers": asdict(value)}  # type: ignore[call-overload]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with atomic.replacing(self.folder / _name(work, machine)) as descriptor:
                atomic.write_at(descriptor, json.dumps(content, indent=1).encode(), 0)
        except OSError as error:
            return [f"the measurements are not stored ({self.folder}: {error.strerror})"]
        return []


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Folder of stored measurements, below XDG_CACHE_HOME or .cache of the home folder."""
    cache = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home()) / ".cache"
    return Path(cache) / "pflmpi" / "calibration"


def _read(kind: type[T], path: Path) -> tuple[T, Facts] | None:
    try:
        content = json.loads(path.read_text())
        return TypeAdapter(kind).validate_python(content["numbers"]), dict(content["machine"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # missing or damaged: it is measured again


def _name(work: Facts, machine: Facts) -> str:
    return f"{_key(work)}-{_key(machine)}.json"


def _key(facts: Facts) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _reset_peaks(device: torch.device) -> tuple[int, int]:
    """Forget the peaks; bytes that the host and the GPU have in use."""
    host = resident()
    with contextlib.suppress(OSError):  # the peak is then that of the whole process, which is more
        Path("/proc/self/clear_refs").write_text("5")
    if device.type != "cuda":
        return host, 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return host, torch.cuda.memory_reserved(device)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    # On a CPU the seconds that this thread computes: what others do on a login node at the same time is left out.
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    began = clock()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - began


def _status(name: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
    except (OSError, StopIteration):
        return 0
