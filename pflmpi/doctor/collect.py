"""The facts of this rank, and those of all ranks on rank 0."""

import contextlib
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
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from glob import glob
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import pflmpi
from pflmpi import machine
from pflmpi.atomic import TEMPORARY
from pflmpi.data.sources import SOURCES
from pflmpi.data.sources.base import SHARED_FOLDER
from pflmpi.doctor.facts import PACKAGES, Clock, Data, Device, Folder, Machine, Mpi, RankFacts, Settings
from pflmpi.errors import DataError, PflmpiError, RunError
from pflmpi.learning.training import TrainingConfig
from pflmpi.runtime.config import RuntimeConfig
from pflmpi.store.names import SHARDS, round_of
from pflmpi.text import first_line
from pflmpi.transports import mpi_library
from pflmpi.transports.base import Transport
from pflmpi.transports.detect import Launch
from pflmpi.transports.peers import Peer
from pflmpi.transports.process_exit import exit_unconnected
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
_MPI_LIMIT = 30.0  # seconds for MPI to start with one rank
_LAUNCHERS = ("OMPI_COMM_WORLD", "PMI", "PRTE_", "PALS_", "SLURM_")  # how the names of their variables begin
_RUNTIME_KEYS = {"transport", "device", "threads"}  # the fields of `Settings`
_NAME = ".pflmpi-doctor"
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_OFFSETS = (0, 512)  # where the HDF5 part of a file begins: without and with the line of `store.checked_hdf5` before it
_LOCK = ".lock"  # the name that `sweep.lock` gives
_LEVELS = 4  # a run of a sweep is three folders below the sweep's lock

Stamp = tuple[int, int]  # bytes and time stamp of a file


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
    before = unfinished(folder) if root else {}
    library = find_mpi(launch, facts.settings.transport, environ)
    with probe_file(folder) if root else nullcontext("") as name:
        place = inspect_folder(folder, from_root(transport, name))
        transport.barrier()  # the file stays until all ranks have looked for it
    clocks = compare_clocks(transport)
    if root:
        place = place.model_copy(update=stale_files(folder, before))
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
    versions = {package: _version(package) for package in PACKAGES}
    return {"python": platform.python_version(), "pflmpi": pflmpi.__version__, **versions}, broken


def _version(package: str) -> str:
    """The version that is loaded, or else the one that is installed."""
    if package in sys.modules:
        return str(getattr(sys.modules[package], "__version__", "unknown"))
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


# --- devices and MPI


def torch_facts(environ: Mapping[str, str]) -> Device:
    """What torch can use."""
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
    return Device(visible=visible, gpus=gpus, gloo=gloo, nccl=version)


def seen_gpus(config: "Config | None", environ: Mapping[str, str]) -> tuple[machine.Gpu, ...]:
    """The GPUs that this rank sees and may use; none where torch or the driver fails, which `try_device` says."""
    try:
        return () if config and config.runtime.device == "cpu" else machine.gpus(environ.get("CUDA_VISIBLE_DEVICES"))
    except (RunError, ImportError, OSError):
        return ()


def try_device(
    found: Device, peers: Sequence[Peer], rank: int, config: "Config | None", transport: str = "inprocess"
) -> Device:
    """The device that a run would give this rank, tried.

    Args:
        found: what torch has.
        peers: all ranks.
        rank: this one.
        config: the configuration, if there is one.
        transport: the name of that to the other ranks.
    """
    if found.error:
        return found
    from pflmpi.runtime.devices import device_of, place
    from pflmpi.runtime.gpu_messages import gpu_messages

    runtime, training = (config.runtime, config.training) if config else (RuntimeConfig(), TrainingConfig())
    about: dict[str, Any] = {"name": "CPU"}
    try:
        if runtime.device != "cpu":
            machine.gpus(found.visible)  # to have its error
        placed = place(peers, runtime, training)
        if placed.number[rank] is not None:
            about = gpu(device_of(placed, rank))
        about["messages"] = gpu_messages(placed, transport).text
    except PflmpiError as error:
        about = {"error": str(error)}
    except RuntimeError as error:  # what torch raises for a GPU that is taken, lost, or too new for it
        about = {"error": f"the GPU cannot be used ({first_line(error)})"}
    return found.model_copy(update=about)


def gpu(chosen: "torch.device") -> dict[str, Any]:
    """What a GPU is; asking for its memory starts it, which fails where it cannot be used."""
    import torch

    free, total = torch.cuda.mem_get_info(chosen)
    properties = torch.cuda.get_device_properties(chosen)
    return {"name": properties.name, "uuid": str(properties.uuid), "memory": total, "memory_free": free}


def find_mpi(launch: Launch, transport: str, environ: Mapping[str, str]) -> Mpi:
    """The MPI library that connects the ranks; without a launcher, the one that is installed."""
    if launch.kind == "alone":
        return in_another_process(environ)
    connects = launch.kind == "mpi" if transport == "auto" else transport == "mpi"
    if connects and launch.kind != "torchrun":  # MPI cannot connect torchrun's ranks, and asking it would start it
        return in_this_process(launch.rank)
    return Mpi()


def in_this_process(rank: int = 0) -> Mpi:
    """MPI as this process sees it, started if need be."""
    try:
        from pflmpi.transports.mpi import world_size
        from pflmpi.transports.mpi_start import start

        start(_MPI_LIMIT, partial(exit_unconnected, rank, {}))
    except (ImportError, RuntimeError, OSError) as error:
        return Mpi(used=True, error=first_line(error))
    library = mpi_library.loaded()
    if library is None:
        return Mpi(used=True, library="unknown", world=world_size())
    return Mpi(used=True, library=library.name, world=world_size(), device_buffers=library.device_buffers)


def in_another_process(environ: Mapping[str, str]) -> Mpi:
    """MPI as a process of one rank sees it: starting MPI may end a process, or hang."""
    for_one = {name: text for name, text in environ.items() if not name.startswith(_LAUNCHERS)}
    try:
        with tempfile.TemporaryDirectory() as folder:  # Open MPI leaves empty folders behind
            done = subprocess.run(
                [sys.executable, "-P", "-m", "pflmpi.doctor.collect"],
                env={**for_one, "TMPDIR": folder},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_MPI_LIMIT,
            )
    except subprocess.TimeoutExpired:
        return Mpi(error=f"it did not start within {_MPI_LIMIT:.0f} s")
    except OSError as error:
        return Mpi(error=f"it could not be tried: {first_line(error)}")
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return Mpi.model_validate_json(lines[-1]).model_copy(update={"used": False})
    said = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
    return Mpi(error=f"it did not start: {said[-1]}")


# --- configuration and data


def read_config(path: Path | None, run: Path | None) -> tuple["Config | None", Settings]:
    """The configuration of a file, or else of a run, and what the checks need of it.

    None, and the default settings, without a configuration; with an `error` if it cannot be used.
    """
    of_run = path is None
    path = path or (run / "config.yaml" if run else None)
    if path is None or (of_run and not path.is_file()):
        return None, Settings()
    try:
        from pflmpi.config.load import parse
        from pflmpi.config.sections import located
        from pflmpi.config.yaml_file import dump, read
        from pflmpi.experiment.code import code_hashes

        raw = located(read(path), path.parent)
        if of_run:
            raw.pop("recorded", None)  # what a run adds to its configuration
        config = parse(raw)
        code = code_hashes(config)
    except PflmpiError as error:
        return None, Settings(error=str(error))
    except (ImportError, OSError):  # torch is broken, which a check of its own finds
        return None, Settings()
    digest = hashlib.sha256(dump({**config.resolved(), "code": code}).encode()).hexdigest()
    return config, Settings(digest=digest, **config.runtime.model_dump(include=_RUNTIME_KEYS))


def find_data(config: "Config | None", environ: Mapping[str, str]) -> Data:
    """Look for the files of the dataset, and for a saved partition; without a configuration, for the data folder."""
    root = (config.data.root if config else None) or environ.get("PFLMPI_DATA", "")
    folder = Path(root).expanduser()
    if config is None:
        missing = f"PFLMPI_DATA = {root!r} is no folder" if root and not folder.is_dir() else ""
        return Data(root=root, error=missing)
    name, saved = config.data.name, config.partition.path
    files: list[Path] = []
    try:
        source = None if config.data.path else SOURCES[name]
        if source is None:
            root, own = "", Path(str(config.data.path))
            files = [own] if own.is_file() else sorted(file for file in own.rglob("*") if file.is_file())
            if not files:
                raise DataError(f"data.path = {str(own)!r} does not exist, or is an empty folder")
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


def existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if os.path.lexists(place))


@contextmanager
def probe_file(folder: Path) -> Iterator[str]:
    """Keep a locked file in the folder, for the other ranks to look for; gives its name, "" where none can be made."""
    path = existing(folder) / f"{_NAME}-{socket.gethostname()}-{os.getpid()}.shared"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except OSError:
        yield ""
        return
    try:
        with contextlib.suppress(OSError):  # `inspect_folder` says whether locks work
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield path.name
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)


def inspect_folder(folder: Path, shared: str) -> Folder:
    """What this rank can do in the folder.

    Args:
        shared: the name of rank 0's probe file, "" if there is none.
    """
    place = existing(folder)
    probe = place / f"{_NAME}-{socket.gethostname()}-{os.getpid()}{TEMPORARY}"
    try:
        with probe.open("wb") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return Folder(path=str(place), error=error.strerror or first_line(error))
    try:
        flock, hdf5 = flock_error(probe), hdf5_error(probe)
    finally:
        probe.unlink(missing_ok=True)
    seen, lock_seen = _seen(place / shared) if shared else (None, None)
    free = shutil.disk_usage(place).free
    return Folder(path=str(place), flock=flock, hdf5=hdf5, seen=seen, lock_seen=lock_seen, free=free)


def flock_error(path: Path) -> str:
    """Why the system cannot lock a file; "" if it can."""
    error = _lock_error(path, fcntl.LOCK_EX)
    return "" if error is None else error.strerror or first_line(error)


def hdf5_error(path: Path) -> str:
    """Why HDF5 cannot write a file with its lock on it; "" if it can, or cannot be imported."""
    try:
        from pflmpi.store.hdf5 import h5py
    except (ImportError, OSError):
        return ""
    try:
        # The environment variable HDF5_USE_FILE_LOCKING overrides this argument.
        with h5py.File(path, "w", locking=True) as file:
            file["probe"] = 1
    except OSError as error:
        return first_line(error)
    return ""


def unfinished(folder: Path) -> dict[str, Stamp]:
    """Half-written files of the runs in the folder, with their stamps."""
    found = {}
    for path in _files(folder):
        if path.name.endswith((f".h5{TEMPORARY}", f"config.yaml{TEMPORARY}")):
            with contextlib.suppress(OSError):  # it was finished meanwhile
                stat = path.stat()
                found[str(path)] = (stat.st_size, stat.st_mtime_ns)
    return found


def stale_files(folder: Path, before: dict[str, Stamp]) -> dict[str, Any]:
    """Fields of `Folder` for what processes that are gone have left in it, and for the locks that are held.

    Args:
        before: `unfinished` some time ago; a file that has changed since then is being written, and so is one that a
            process of this host has open.
    """
    unchanged = [path for path, stamp in unfinished(folder).items() if before.get(path) == stamp]
    flagged = [str(path) for path in _files(folder) if round_of(path.name) is not None and _flag(path)]
    sweeps = [place / _LOCK for place in [folder, *folder.parents][:_LEVELS]]
    held = [str(path) for path in (folder.parent / f".{folder.name}{_LOCK}", *sweeps) if _is_held(path)]
    users = _processes([*unchanged, *flagged, *held])
    return {
        "unfinished": tuple(path for path in sorted(unchanged) if path not in users),
        "flagged": tuple(path for path in sorted(flagged) if path not in users),
        "locked": {path: tuple(sorted(users.get(path, ()))) for path in held},
    }


def _processes(paths: Collection[str]) -> dict[str, set[int]]:
    """The processes of this host that have the files open, as far as this user may see them."""
    found: dict[str, set[int]] = {}
    by_target = {os.path.realpath(path): path for path in paths}
    for process in Path("/proc").glob("[0-9]*") if paths else ():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):  # closed meanwhile
                    path = by_target.get(os.readlink(descriptor))
                    if path is not None:
                        found.setdefault(path, set()).add(int(process.name))
    return found


def _files(folder: Path) -> list[Path]:
    """What is in the folder of a run, or of a sweep: in the runs right below it, and in the shards of these."""
    patterns = ("*", "*/*", f"*/{SHARDS}/*")
    return [folder / name for pattern in patterns for name in glob(pattern, root_dir=folder, include_hidden=True)]


def _flag(path: Path) -> bool:
    """Whether the superblock says that the file is open for writing; only its versions 2 and 3 can."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        head = file.read(_OFFSETS[-1] + 12)
        for offset in _OFFSETS:
            block = head[offset : offset + 12]
            if block.startswith(_SIGNATURE) and len(block) == 12:
                return block[8] in (2, 3) and bool(block[11] & 1)
    return False


def _seen(path: Path) -> tuple[bool, bool | None]:
    """Whether a file is there, and whether the lock on it holds here; None if that is unknown."""
    error = _lock_error(path, fcntl.LOCK_SH)  # shared, so that the ranks that try do not lock each other out
    if error is None or isinstance(error, BlockingIOError):
        return True, error is not None
    return not isinstance(error, FileNotFoundError), None


def _is_held(path: Path) -> bool:
    return isinstance(_lock_error(path, fcntl.LOCK_EX), BlockingIOError)


def _lock_error(path: Path, kind: int) -> OSError | None:
    """Try to lock a file for a moment."""
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error
    return None


if __name__ == "__main__":
    answer = in_this_process()
    if answer.world:
        from pflmpi.transports.mpi import MpiTransport

        MpiTransport(_MPI_LIMIT).close()  # without it, MPI may leave shared memory behind
    print(answer.model_dump_json())
