"""Facts about each rank, and how they are collected and sent to rank 0 as JSON."""

import fcntl
import hashlib
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict

import pflmpi
from pflmpi import machine
from pflmpi.atomic import TEMPORARY
from pflmpi.data.sources import SOURCES
from pflmpi.data.sources.base import SHARED_FOLDER
from pflmpi.errors import DataError, PflmpiError, RunError
from pflmpi.learning.training import TrainingConfig
from pflmpi.runtime.config import RuntimeConfig
from pflmpi.text import first_line
from pflmpi.transports.base import Buffer, Transport, exit_unconnected
from pflmpi.transports.detect import Launch
from pflmpi.transports.peers import Peer
from pflmpi.transports.slurm import is_in_step, read_num_tasks

if TYPE_CHECKING:
    import torch

    from pflmpi.config.load import Config

PACKAGES = ("torch", "numpy", "h5py", "mpi4py")  # versions must be equal on all ranks
_IMPORTED = {"torch": "torch", "numpy": "numpy", "h5py": "pflmpi.store.hdf5"}  # package -> the module that loads it
_SHARED_MEMORY = Path("/dev/shm")
_SLURM = {
    "job": "SLURM_JOB_ID",
    "step": "SLURM_STEP_ID",
    "nodes": "SLURM_JOB_NODELIST",
    "gpus": "SLURM_STEP_GPUS",
    "mpi": "SLURM_MPI_TYPE",
}
_MPI_TIMEOUT = 30.0  # seconds for MPI to start with one rank
_LAUNCHER_PREFIXES = (
    "OMPI_COMM_WORLD",
    "PMI",
    "PRTE_",
    "PALS_",
    "SLURM_",
)  # prefixes of launchers' environment variables
_PROBE = ".pflmpi-doctor"
_MESSAGE_BYTES = 1 << 20  # size of the messages that are timed


class _Facts(BaseModel):
    # Ranks may have different versions of pflmpi, which is one of the problems to find: unknown keys are dropped, and
    # missing ones get their defaults.
    model_config = ConfigDict(frozen=True, extra="ignore")


class Settings(_Facts):
    """Values of the configuration, or defaults without one."""

    error: str = ""  # why the configuration cannot be used
    digest: str = ""  # of the resolved configuration
    transport: str = "auto"  # runtime.transport
    threads: int = 1  # runtime.threads


class Machine(_Facts):
    """The part of a host that a rank may use; sizes in bytes, 0 where unknown."""

    cores: tuple[int, ...] = ()
    omp: str | None = None  # OMP_NUM_THREADS, None if not set
    memory: int = 0  # of the host, or of its control group (a job, a container) if that has less
    memory_free: int = 0
    shared_free: int | None = None  # of /dev/shm, None if there is none


class Device(_Facts):
    """The device of a rank, and the backends that torch has."""

    name: str = ""  # "CPU", or the GPU's name
    gpus: int = 0  # number of GPUs that torch finds
    uuid: str = ""  # of the GPU
    memory: int = 0  # bytes of the GPU
    memory_free: int = 0
    visible: str | None = None  # CUDA_VISIBLE_DEVICES, None if not set
    error: str = ""  # why the rank cannot compute
    gloo: bool = False  # whether torch.distributed has gloo
    nccl: str = ""  # version of NCCL or RCCL, "" without
    platform: str = ""  # torch's GPU platform and its communication library: "CUDA 13.0, NCCL"


class Mpi(_Facts):
    used: bool = False  # whether it connects the ranks
    library: str = ""  # name and version, "" without one
    world: int = 0  # world size that it sees, 0 if it was not started
    device_buffers: bool | None = None  # whether it sends GPU buffers, None if unknown
    error: str = ""  # why it cannot be used


class Folder(_Facts):
    """The folder of a run, or its nearest parent that exists."""

    path: str = ""
    error: str = ""  # why it cannot be written
    seen: bool | None = None  # whether rank 0's probe file is there, None if rank 0 could not write one
    lock_seen: bool | None = None  # whether rank 0's lock on it is seen here, None if unknown
    free: int = 0  # bytes


class Data(_Facts):
    name: str = ""  # of the dataset, "" without a configuration
    root: str = ""  # the data folder, "" if none is set
    files: int = 0  # number of files
    digest: str = ""  # of the files' names and sizes
    error: str = ""  # what is missing
    download: bool = False  # whether a run would fetch what is missing


class RankFacts(_Facts):
    rank: int = 0  # by the launcher's variables, as `size`
    size: int = 1
    launcher: str = "alone"  # or "mpi", "torchrun", "slurm"; "unclear" if its variables contradict each other
    host: str = ""
    connection: str = ""  # why this rank has no connection to the others
    settings: Settings = Settings()
    machine: Machine = Machine()
    device: Device = Device()
    mpi: Mpi = Mpi()
    messages: str = ""  # route of large messages, the reason for it, and seconds; "" without other ranks
    folder: Folder = Folder()
    data: Data = Data()
    slurm: dict[str, str] = {}  # Slurm's variables by short names, empty outside a job
    versions: dict[str, str] = {}  # package -> version, "" if it is not installed
    broken: dict[str, str] = {}  # package that cannot be imported -> the reason


def collect_facts(launch: Launch, config: "Config | None", settings: Settings, environ: Mapping[str, str]) -> RankFacts:
    """Collects the facts of a rank before it connects to the others; this is the slow part."""
    versions, broken = _read_versions()
    return RankFacts(
        rank=launch.rank,
        size=launch.size,
        launcher=launch.kind,
        host=socket.gethostname(),
        settings=settings,
        machine=_read_machine(environ),
        device=read_torch(environ),
        data=find_data(config, environ),
        slurm=_read_slurm(environ),
        versions=versions,
        broken=broken,
    )


def gather_facts(
    facts: RankFacts,
    config: "Config | None",
    transport: Transport,
    launch: Launch,
    folder: Path,
    environ: Mapping[str, str],
) -> list[RankFacts]:
    """Gathers the facts of all ranks on rank 0; returns [] on the others.

    Raises:
        TransportError: a rank was lost, or did not answer in time.
    """
    mpi = find_mpi(launch, facts.settings.transport, environ)
    with hold_probe_file(folder) if transport.rank == 0 else nullcontext("") as name:
        run_folder = inspect_folder(folder, transport.broadcast_text(name))
        transport.barrier()  # the file stays until all ranks have looked for it
    device = try_device(facts.device, transport.peers, transport.rank, config)
    facts = facts.model_copy(update={"mpi": mpi, "folder": run_folder, "device": device})
    texts = transport.gather_texts(facts.model_dump_json()) or []
    ranks = [RankFacts.model_validate_json(text) for text in texts]
    if transport.size > 1 and not transport.broadcast_text(" ".join(rank.device.error for rank in ranks)).strip():
        messages = try_messages(transport, config)
        ranks = [rank.model_copy(update={"messages": messages}) for rank in ranks]
    return ranks


def _read_machine(environ: Mapping[str, str]) -> Machine:
    total, free = machine.memory()
    return Machine(
        cores=machine.cores(),
        omp=environ.get("OMP_NUM_THREADS"),
        memory=total,
        memory_free=free,
        shared_free=shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else None,
    )


def _read_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    if "SLURM_JOB_ID" not in environ:
        return {}
    variables = {name: environ.get(variable, "") for name, variable in _SLURM.items()}
    if not is_in_step(environ):
        variables["step"] = ""
    return {**variables, "tasks": read_num_tasks(environ) or ""}


def _read_versions() -> tuple[dict[str, str], dict[str, str]]:
    """Returns the version of each package ("" if not installed), and the error of each that cannot be imported.

    mpi4py is not imported, because that would start MPI.
    """
    broken = {}
    for package, module in _IMPORTED.items():
        try:
            import_module(module)
        except (ImportError, OSError) as error:
            broken[package] = first_line(error)
    versions = {package: _find_version(package) for package in PACKAGES}
    return {"python": platform.python_version(), "pflmpi": pflmpi.__version__, **versions}, broken


def _find_version(package: str) -> str:
    """The loaded version, else the installed one."""
    if package in sys.modules:
        return str(getattr(sys.modules[package], "__version__", "unknown"))
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


# --- devices and MPI


def read_torch(environ: Mapping[str, str]) -> Device:
    """Reads which GPUs and communication backends torch has."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of torch's own libraries is missing
        return Device(visible=visible, error=f"torch cannot be imported ({first_line(error)})")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    backends = torch.distributed
    gloo = backends.is_available() and backends.is_gloo_available()
    nccl = backends.is_available() and backends.is_nccl_available()
    version = ".".join(map(str, torch.cuda.nccl.version())) if nccl else ""  # type: ignore[no-untyped-call]
    platform = ", ".join(filter(None, machine.gpu_platform()))
    return Device(visible=visible, gpus=gpus, gloo=gloo, nccl=version, platform=platform)


def find_visible_gpus(config: "Config | None", environ: Mapping[str, str]) -> tuple[machine.Gpu, ...]:
    """Finds the GPUs that this rank may use; none if torch or the driver fails, which `try_device` reports."""
    try:
        return () if config and config.runtime.device == "cpu" else machine.gpus(environ.get("CUDA_VISIBLE_DEVICES"))
    except (RunError, ImportError, OSError):
        return ()


def try_device(device: Device, peers: Sequence[Peer], rank: int, config: "Config | None") -> Device:
    """Tries the device that a run would give this rank."""
    if device.error:
        return device
    from pflmpi.runtime.devices import choose_gpus, find_device

    runtime, training = (config.runtime, config.training) if config else (RuntimeConfig(), TrainingConfig())
    changes: dict[str, Any] = {"name": "CPU"}
    try:
        if runtime.device != "cpu":
            machine.gpus(device.visible)  # for its error
        placed = choose_gpus(peers, runtime, training)
        if placed.number[rank] is not None:
            changes = read_gpu(find_device(placed, rank))
    except PflmpiError as error:
        changes = {"error": str(error)}
    except RuntimeError as error:  # what torch raises for a GPU that is taken, lost, or too new for it
        changes = {"error": f"the GPU cannot be used ({first_line(error)}); {machine.GPU_REMEDY}"}
    return device.model_copy(update=changes)


def try_messages(transport: Transport, config: "Config | None") -> str:
    """Returns the route of large messages, and the seconds of one on the slowest rank; all ranks call this.

    Raises:
        TransportError: messages do not arrive, or NCCL does not start.
    """
    from pflmpi.runtime.devices import find_device, gpu_messages, place_ranks

    runtime = config.runtime if config else RuntimeConfig()
    placed, (rank, size) = place_ranks(transport.peers, runtime), (transport.rank, transport.size)
    between_gpus = gpu_messages(placed, transport.name, runtime.between_gpus)
    device = find_device(placed, rank)
    if between_gpus.ranks:
        transport.use_gpus(between_gpus.ranks, device)

    def empty(size: int) -> Buffer:
        if rank not in between_gpus.ranks:
            return np.zeros(size, np.uint8)
        import torch

        return torch.zeros(size, dtype=torch.uint8, device=device)

    message, total = empty(_MESSAGE_BYTES), size * _MESSAGE_BYTES
    sent, received = {(rank + 1) % size: message}, {(rank - 1) % size: _MESSAGE_BYTES}
    calls = (
        lambda: transport.broadcast(message),
        lambda: transport.exchange(sent, received, total, empty=empty),
    )
    seconds = transport.maximum(np.array([_time_call(transport, call) for call in calls]))
    route = between_gpus.text or {"mpi": "MPI", "torch": "gloo"}.get(transport.name, transport.name)
    to_all, to_the_next = (f"{1e3 * value:.3g} ms" for value in seconds)
    return f"{route}: 1 MiB from rank 0 to all in {to_all}, to the next rank in {to_the_next}"


def _time_call(transport: Transport, call: Callable[[], object]) -> float:
    """Seconds of a second call, when connections and buffers exist."""
    call()
    transport.barrier()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def read_gpu(device: "torch.device") -> dict[str, Any]:
    """Reads name and memory of a GPU; this initialises it, which fails if it cannot be used."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    properties = torch.cuda.get_device_properties(device)
    return {"name": properties.name, "uuid": str(properties.uuid), "memory": total, "memory_free": free}


def find_mpi(launch: Launch, transport: str, environ: Mapping[str, str]) -> Mpi:
    """Finds the MPI library that connects the ranks; without a launcher, the installed one."""
    if launch.kind == "alone":
        return try_mpi(environ)
    connects = launch.kind == "mpi" if transport == "auto" else transport == "mpi"
    if connects and launch.kind != "torchrun":  # MPI cannot connect torchrun's ranks, and asking it would start it
        return start_mpi(launch.rank)
    return Mpi()


def start_mpi(rank: int = 0) -> Mpi:
    """Starts MPI in this process, if it has not started yet, and returns what it says."""
    try:
        from pflmpi.transports.mpi import library_name, open_library, query_device_buffers, start, world_size

        start(_MPI_TIMEOUT, partial(exit_unconnected, rank, {}))
    except (ImportError, RuntimeError, OSError) as error:
        return Mpi(used=True, error=first_line(error))
    device_buffers = query_device_buffers(open_library())
    return Mpi(used=True, library=library_name(), world=world_size(), device_buffers=device_buffers)


def try_mpi(environ: Mapping[str, str]) -> Mpi:
    """Starts MPI in a subprocess with one rank, because starting it may end a process, or hang."""
    alone = {name: text for name, text in environ.items() if not name.startswith(_LAUNCHER_PREFIXES)}
    try:
        with tempfile.TemporaryDirectory() as folder:  # Open MPI leaves empty folders behind
            done = subprocess.run(
                [sys.executable, "-P", "-m", __name__],
                env={**alone, "TMPDIR": folder},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_MPI_TIMEOUT,
            )
    except subprocess.TimeoutExpired:
        return Mpi(error=f"it did not start within {_MPI_TIMEOUT:.0f} s")
    except OSError as error:
        return Mpi(error=f"it could not be tried: {first_line(error)}")
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return Mpi.model_validate_json(lines[-1]).model_copy(update={"used": False})
    errors = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
    return Mpi(error=f"it did not start: {errors[-1]}")


# --- configuration and data


def read_config(path: Path | None, run: Path | None) -> tuple["Config | None", Settings]:
    """Reads the configuration of a file, else of a run, and what the checks need of it.

    Without a configuration, or with one that cannot be used: None and default settings, with its `error`.
    """
    if path is None and run is not None and (run / "config.yaml").is_file():
        path = run / "config.yaml"
    if path is None:
        return None, Settings()
    try:
        from pflmpi.config.load import load
        from pflmpi.config.yaml_file import dump
        from pflmpi.experiment.outside_code import code_hashes

        config = load(path)
        code = code_hashes(config)
    except PflmpiError as error:
        return None, Settings(error=str(error))
    except (ImportError, OSError):  # torch is broken, which another check finds
        return None, Settings()
    digest = hashlib.sha256(dump({**config.resolved(), "code": code}).encode()).hexdigest()
    return config, Settings(digest=digest, transport=config.runtime.transport, threads=config.runtime.threads)


def find_data(config: "Config | None", environ: Mapping[str, str]) -> Data:
    """Finds the files of the dataset and a saved partition; without a configuration, the data folder."""
    root = (config.data.root if config else None) or environ.get("PFLMPI_DATA", "")
    folder = machine.expand_path(root)
    if config is None:
        missing = f"PFLMPI_DATA = {root!r} is no folder" if root and not folder.is_dir() else ""
        return Data(root=root, error=missing)
    name, saved = config.data.name, config.partition.path
    files: list[Path] = []
    try:
        source = None if config.data.path else SOURCES[name]
        if source is None:
            root, path = "", Path(str(config.data.path))
            files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
            if not files:
                raise DataError(f"data.path = {str(path)!r} does not exist, or is an empty folder")
        elif isinstance(source, type) or source.embedded:
            root = ""
        elif root:
            files = source.files(folder)
        else:
            return Data(name=name, error=f"no data folder is set for dataset {name!r}; {SHARED_FOLDER}")
        if saved:
            if not os.access(saved, os.R_OK):
                raise DataError(f"the saved partition {saved} cannot be read")
            files = [*files, Path(saved)]
    except PflmpiError as error:
        return Data(name=name, root=root, error=str(error), download=config.data.download)
    sizes = [(path.name, os.path.getsize(path)) for path in files]
    return Data(name=name, root=root, files=len(files), digest=hashlib.sha256(repr(sizes).encode()).hexdigest())


# --- the run folder


@contextmanager
def hold_probe_file(folder: Path) -> Iterator[str]:
    """Holds a locked file in the folder for the other ranks to look for; yields its name, "" if it cannot be made."""
    path = machine.nearest_existing(folder, os.path.lexists) / f"{_PROBE}-{socket.gethostname()}-{os.getpid()}.shared"
    try:
        file = path.open("xb")
    except OSError:
        yield ""
        return
    try:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield path.name
    finally:
        file.close()
        path.unlink(missing_ok=True)


def inspect_folder(folder: Path, shared: str) -> Folder:
    """Inspects what this rank can do in the folder.

    Args:
        shared: name of rank 0's probe file, "" if there is none.
    """
    place = machine.nearest_existing(folder, os.path.lexists)
    probe = place / f"{_PROBE}-{socket.gethostname()}-{os.getpid()}{TEMPORARY}"
    try:
        with probe.open("wb") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return Folder(path=str(place), error=error.strerror or first_line(error))
    finally:
        with suppress(OSError):  # it may not have been written
            probe.unlink()
    seen = (place / shared).exists() if shared else None
    lock_seen = _is_locked(place / shared) if seen else None
    return Folder(path=str(place), seen=seen, lock_seen=lock_seen, free=shutil.disk_usage(place).free)


def _is_locked(path: Path) -> bool | None:
    """Whether another process has locked a file; None if files cannot be locked."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, so that ranks do not lock each other out
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


if __name__ == "__main__":
    answer = start_mpi()
    if answer.world:
        from pflmpi.transports.mpi import MpiTransport

        MpiTransport(_MPI_TIMEOUT).close()  # without it, MPI may leave shared memory behind
    print(answer.model_dump_json())
