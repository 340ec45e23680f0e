"""What a rank may use of its host."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from pflmpi.doctor.facts import Machine
from pflmpi.machine import cores, memory, temporary

_SHARED = Path("/dev/shm")


def machine(environ: Mapping[str, str]) -> Machine:
    """Cores, threads, memory and temporary space of this process."""
    total, free = memory()
    folder, folder_free = temporary()
    return Machine(
        cores=cores(),
        omp=environ.get("OMP_NUM_THREADS"),
        memory=total,
        memory_free=free,
        shared_free=shutil.disk_usage(_SHARED).free if _SHARED.is_dir() else None,
        temporary=folder,
        temporary_free=folder_free,
    )
