"""The facts of this rank, and those of all ranks on rank 0."""

import logging
import platform
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import pflmpi
from pflmpi import machine
from pflmpi.doctor import run_folder
from pflmpi.doctor.facts import Clock, Device, Machine, RankFacts, Settings
from pflmpi.doctor.mpi import find_mpi
from pflmpi.doctor.requested import find_data
from pflmpi.errors import ConfigError
from pflmpi.learning.training import TrainingConfig
from pflmpi.runtime.config import RuntimeConfig
from pflmpi.text import first_line
from pflmpi.transports.base import Transport
from pflmpi.transports.detect import Launch
from pflmpi.transports.slurm import in_step, num_tasks
from pflmpi.transports.text import from_root, gather_texts

if TYPE_CHECKING:
    import torch

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
        device=_device(launch, config, environ),
        data=find_data(config, environ),
        slurm=_slurm(environ),
        versions=versions,
        broken=broken,
    )


def all_facts(
    facts: RankFacts, transport: Transport, launch: Launch, folder: Path, environ: Mapping[str, str]
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
    mine = facts.model_copy(update={"mpi": library, "folder": place})
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


def gpu(chosen: "torch.device") -> dict[str, Any]:
    """What a GPU is; asking for its memory starts it, which fails where it cannot be used."""
    import torch

    free, total = torch.cuda.mem_get_info(chosen)
    properties = torch.cuda.get_device_properties(chosen)
    return {"name": properties.name, "uuid": str(properties.uuid), "memory": total, "memory_free": free}


def _device(launch: Launch, config: "Config | None", environ: Mapping[str, str]) -> Device:
    """The device of this rank, chosen as a run chooses it, and tried."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    try:
        import torch

        from pflmpi.runtime import devices
    except (ImportError, OSError) as error:  # OSError: one of torch's own libraries is missing
        return Device(visible=visible, error=f"torch cannot be imported ({first_line(error)})")
    logging.getLogger("pflmpi.runtime.devices").setLevel(logging.ERROR)  # the checks find what it warns of
    found: dict[str, Any]
    try:
        runtime, training = (config.runtime, config.training) if config else (RuntimeConfig(), TrainingConfig())
        chosen = devices.choose(runtime, training, launch)
        found = {"name": "CPU"} if chosen.type == "cpu" else gpu(chosen)
    except ConfigError as error:
        found = {"error": str(error)}
    except RuntimeError as error:  # what torch raises for a GPU that is taken, lost, or too new for it
        found = {"error": f"the GPU cannot be used ({first_line(error)})"}
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    backends = torch.distributed
    gloo = backends.is_available() and backends.is_gloo_available()
    nccl = backends.is_available() and backends.is_nccl_available()
    version = ".".join(map(str, torch.cuda.nccl.version())) if nccl else ""  # type: ignore[no-untyped-call]
    return Device(visible=visible, gpus=gpus, gloo=gloo, nccl=version, **found)


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
