"""What a rank may use of its host."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pflmpi.doctor.facts import Machine
from pflmpi.machine import memory

_SHARED = Path("/dev/shm")


def machine(environ: Mapping[str, str]) -> Machine:
    """Return cores, threads, memory and temporary space of this process."""
    total, free = memory()
    temporary, temporary_free = _temporary()
    return Machine(
        cores=tuple(sorted(_cores())),
        omp=environ.get("OMP_NUM_THREADS"),
        memory=total,
        memory_free=free,
        shared_free=shutil.disk_usage(_SHARED).free if _SHARED.is_dir() else None,
        temporary=temporary,
        temporary_free=temporary_free,
    )


def _cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _temporary() -> tuple[str, int]:
    """Return the folder for temporary files and its free bytes; "" where no file can be made in any."""
    try:
        folder = tempfile.gettempdir()
        return folder, shutil.disk_usage(folder).free
    except OSError:
        return "", 0
