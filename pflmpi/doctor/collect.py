"""The facts of this rank, and those of all ranks on rank 0."""

import platform
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import pflmpi
from pflmpi import machine
from pflmpi.doctor import run_folder
from pflmpi.doctor.device import torch_facts, try_device
from pflmpi.doctor.facts import Clock, Machine, RankFacts, Settings
from pflmpi.doctor.mpi import find_mpi
from pflmpi.doctor.requested import find_data
from pflmpi.text import first_line
from pflmpi.transports.base import Transport
from pflmpi.transports.detect import Launch
from pflmpi.transports.slurm import in_step, num_tasks
from pflmpi.transports.text import from_root, gather_texts

if TYPE_CHECKING:
    from pflmpi.config.load import Config

_IMPORTED = {"torch": "torch", "numpy": "numpy", "h5py": "pflmpi.store.hdf5"}  # package -> the module that loads it
_SHARED_MEMORY = Path("/dev/shm")
_SLURM = {
    "job": "SLURM_JOB_ID",
    "step": "SLURM_STEP_ID",
    "nodes": "SLURM_JOB_NODELIST",
    "gpus": "SLURM_STEP_GPUS",
    "mpi": "SLURM_MPI_TYPE",
}
_EXCHANGES = 5  # of the ranks' clocks; the quickest is the most exact


def rank_facts(launch: Launch, config: "Config | None", settings: Settings, environ: Mapping[str, str]) -> RankFacts:
    """What this rank finds out alone, before it is connected to the others: the slow part."""
    versions, broken = _packages()
    return RankFacts(
        rank=launch.rank,
        size=launch.size,
        launcher=launch.kind,
        host=socket.gethostname(),
        settings=settings,
        machine=_machine(environ),
        device=torch_facts(environ),
        data=find_data(config, environ),
        slurm=_slurm(environ),
        versions=versions,
        broken=broken,
    )


def all_facts(
    facts: RankFacts,
    config: "Config | None",
    transport: Transport,
    launch: Launch,
    folder: Path,
    environ: Mapping[str, str],
) -> list[RankFacts]:
    """The facts of all ranks on rank 0, [] on the others.

    Raises:
        TransportError: a rank was lost, or did not answer in time.
    """
    root = transport.rank == 0
    before = run_folder.unfinished(folder) if root else {}
    library = find_mpi(launch, facts.settings.transport, environ)
    with run_folder.probe_file(folder) if root else nullcontext("") as name:
        place = run_folder.inspect_folder(folder, from_root(transport, name))
        transport.barrier()  # the file stays until all ranks have looked for it
    clocks = compare_clocks(transport)
    if root:
        place = place.model_copy(update=run_folder.stale_files(folder, before))
    device = try_device(facts.device, transport.peers, transport.rank, config, transport.name)
    mine = facts.model_copy(update={"mpi": library, "folder": place, "device": device})
    texts = gather_texts(transport, mine.model_dump_json()) or []
    everyone = [RankFacts.model_validate_json(text) for text in texts]
    return [one.model_copy(update={"clock": clock}) for one, clock in zip(everyone, clocks, strict=True)]


def compare_clocks(transport: Transport) -> list[Clock]:
    """How far each rank's clock is ahead of rank 0's; [] on the other ranks.

    A rank reads its clock after it has heard from rank 0 and before rank 0 hears from it: between the two times that
    rank 0 reads.
    """
    best: list[Clock] = []
    for _ in range(_EXCHANGES):
        transport.barrier()
        before = time.time()
        transport.broadcast(np.zeros(1, np.uint8))
        times = transport.gather(np.array([time.time()]).view(np.uint8), [8] * transport.size)
        after = time.time()
        if times is not None and (not best or after - before < 2 * best[0].within):
            middle, within = (before + after) / 2, (after - before) / 2
            read = np.concatenate(times).view(np.float64)
            best = [Clock(ahead=float(each) - middle, within=within) for each in read]
    return best


def _machine(environ: Mapping[str, str]) -> Machine:
    total, free = machine.memory()
    folder, folder_free = machine.temporary()
    return Machine(
        cores=machine.cores(),
        omp=environ.get("OMP_NUM_THREADS"),
        memory=total,
        memory_free=free,
        shared_free=shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else None,
        temporary=folder,
        temporary_free=folder_free,
    )


def _slurm(environ: Mapping[str, str]) -> dict[str, str]:
    if "SLURM_JOB_ID" not in environ:
        return {}
    found = {name: environ.get(variable, "") for name, variable in _SLURM.items()}
    if not in_step(environ):
        found["step"] = ""
    return {**found, "tasks": num_tasks(environ) or ""}


def _packages() -> tuple[dict[str, str], dict[str, str]]:
    """The version of each package ("" if it is not installed), and why those that cannot be imported cannot.

    mpi4py is not imported here, because it would start MPI.
    """
    broken = {}
    for package, module in _IMPORTED.items():
        try:
            import_module(module)
        except (ImportError, OSError) as error:
            broken[package] = first_line(error)
    versions = {package: _version(package) for package in (*_IMPORTED, "mpi4py")}
    return {"python": platform.python_version(), "pflmpi": pflmpi.__version__, **versions}, broken


def _version(package: str) -> str:
    """The version that is loaded, or else the one that is installed."""
    if package in sys.modules:
        return str(getattr(sys.modules[package], "__version__", "unknown"))
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
