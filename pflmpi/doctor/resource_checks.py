"""Checks of what the ranks have of their host: GPUs, cores, memory, and the folder of the run."""

from collections.abc import Iterator, Sequence

from pflmpi.doctor.facts import RankFacts
from pflmpi.doctor.problems import Check, Found, Problem, by, each_host, each_rank, numbers
from pflmpi.text import counted, size, some

_MEMORY = 256 << 20  # bytes that a rank still needs once its libraries are loaded, for the smallest models
_SHARED = 32 << 20  # bytes of /dev/shm per rank: what MPI and NCCL take for messages within a host
_TEMPORARY = 64 << 20  # bytes for the sockets and sessions of launchers
_DISK = 1 << 30  # bytes for checkpoints; `pflmpi plan` says how many a run really takes
_NO_GPU = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES that hide all GPUs
_OTHER_FOLDER = "choose a folder (--out) on a file system that all hosts share and that you can write"


@each_rank
def devices(one: RankFacts) -> Found:
    """A rank cannot compute where it should."""
    visible = one.device.visible
    if one.device.error:
        remedy = "see with nvidia-smi whether the GPU is free and its driver fits torch, or set runtime.device=cpu"
        if "torch" in one.broken:
            remedy = "install the package again (pip install --force-reinstall torch), alike on all hosts"
        yield one.device.error, remedy
    elif visible is not None and visible not in _NO_GPU and not one.device.gpus and one.settings.device != "cpu":
        yield (
            f"CUDA_VISIBLE_DEVICES = {visible!r}, but torch finds no GPU",
            "see with nvidia-smi whether the driver works, install a torch that was built for CUDA, or set "
            "runtime.device=cpu",
        )


def shared_gpus(everyone: Sequence[RankFacts]) -> Iterator[Problem]:
    """Several ranks of a host compute on one GPU."""
    for (_, uuid), group in by(everyone, lambda one: (one.host, one.device.uuid)).items():
        if len(group) > 1 and uuid:
            remedy = (
                "give each its own (--ntasks-per-node as many as GPUs, --gpus-per-task=1 or --gpus-per-node), or start "
                "fewer; clients are shared out among ranks, so one rank per GPU is fastest. Where they must share it, "
                "start NVIDIA's MPS first (nvidia-cuda-mps-control -d); without it they take turns"
            )
            yield Problem(f"{_ranks(group)} share one GPU ({group[0].device.name}, {uuid})", remedy, numbers(group))


@each_rank
def thread_number(one: RankFacts) -> Found:
    """OMP_NUM_THREADS is no number."""
    if one.machine.omp is not None and not _number(one.machine.omp):
        yield f"OMP_NUM_THREADS = {one.machine.omp!r} is no number of threads", "export OMP_NUM_THREADS=1"


@each_host
def threads_and_cores(group: Sequence[RankFacts]) -> Found:
    """The ranks of a host start more threads than they have cores."""
    num_cores = _num_cores(group)
    threads = [_threads(one) for one in group]
    if not num_cores or max(threads) == 1 or sum(threads) <= num_cores:
        return
    unset = " (OMP_NUM_THREADS is not set)" if all(one.machine.omp is None for one in group) else ""
    each = " each" if len(group) > 1 else ""
    fitting = max(num_cores // len(group), 1)
    remedy = f"export OMP_NUM_THREADS={fitting}"
    if any(one.settings.threads > fitting for one in group):
        remedy += f" and set runtime.threads={fitting}"
    what = f"{_ranks(group)} with {max(threads)} threads{each}{unset} on {counted(num_cores, 'core')}"
    yield what, f"{remedy}, or give them more cores (--cpus-per-task)"


@each_host
def ranks_and_cores(group: Sequence[RankFacts]) -> Found:
    """A host has more ranks than cores for them."""
    num_cores = _num_cores(group)
    if 0 < num_cores < len(group):
        yield (
            f"{_ranks(group)} on {counted(num_cores, 'core')}",
            f"start at most {num_cores} on a host (--ntasks-per-node), or let them have more cores (--cpus-per-task; "
            "mpirun --bind-to none if they were bound to the same ones)",
        )


@each_host
def memory(group: Sequence[RankFacts]) -> Found:
    """Too little memory, or shared memory, is left on a host."""
    free = min(one.machine.memory_free for one in group)
    if any(one.machine.memory for one in group) and free < _MEMORY * len(group):
        what = f"{size(free)} of memory are left for {_ranks(group)}, and each needs {size(_MEMORY)}"
        yield what, "start fewer ranks on a host, or request more memory (--mem, --mem-per-cpu)"
    shared = [one.machine.shared_free for one in group if one.machine.shared_free is not None]
    if len(group) > 1 and shared and min(shared) < _SHARED * len(group):
        remedy = f"{size(_SHARED)} per rank are enough: remove old files there, or docker run --shm-size=1g"
        yield f"/dev/shm has {size(min(shared))} left for the messages of {_ranks(group)}", remedy


@each_rank
def temporary_files(one: RankFacts) -> Found:
    """Too little space for temporary files is left."""
    if one.machine.temporary_free < _TEMPORARY:
        where = one.machine.temporary or "no folder for temporary files can be written"
        what = f"{where}: {size(one.machine.temporary_free)} left"
        yield what, "free space there, or set TMPDIR to a folder of this host with more"


@each_rank
def run_folder(one: RankFacts) -> Found:
    """The folder cannot be written, is not the same one everywhere, or is nearly full."""
    path = one.folder.path
    if one.folder.error:
        yield f"the run folder {path} cannot be written ({one.folder.error})", _OTHER_FOLDER
        return
    if one.folder.seen is False:
        yield f"{path} is not rank 0's run folder: a file that rank 0 made is not there", _OTHER_FOLDER
    if one.folder.free < _DISK:
        what = f"{size(one.folder.free)} are left on the file system of {path}"
        yield what, "free space (see also your quota), or choose another folder (--out)"


@each_rank
def locking(one: RankFacts) -> Found:
    """Files in the run folder cannot be locked."""
    path = one.folder.path
    if one.folder.hdf5:
        yield (
            f"HDF5 cannot lock files in {path} ({one.folder.hdf5})",
            "export HDF5_USE_FILE_LOCKING=FALSE for programs that read checkpoints; pflmpi itself needs no locks",
        )
    if one.folder.flock:
        yield (
            f"files in {path} cannot be locked ({one.folder.flock})",
            "keep sweeps, which lock their folder, on another file system, or mount it with locks (Lustre: flock)",
        )
    elif one.folder.seen and one.folder.lock_seen is False:
        yield (
            f"a lock that rank 0 holds in {path} is not seen here: locks hold on one host only",
            "never start two sweeps in one folder from two hosts, or mount it with locks for all (Lustre: flock)",
        )


@each_rank
def stale_files(one: RankFacts) -> Found:
    """Processes that are gone have left half-written files, marks or locks in the folder; only rank 0 looks."""
    if one.folder.unfinished:
        yield (
            f"stale: {some(one.folder.unfinished)}, left half-written by a process that is gone",
            "once no job writes this run (squeue), `pflmpi resume RUN` removes them and continues",
        )
    if one.folder.flagged:
        yield (
            f"stale: {some(one.folder.flagged)}, marked as being written by a process that is gone",
            "remove the mark (h5clear --status FILE), then `pflmpi inspect RUN` says whether it is whole; if not, "
            "`pflmpi resume RUN` continues from the checkpoint before it",
        )
    for path, holders in one.folder.locked.items():
        if holders:
            what = f"{path} is locked by a running sweep, or by processes that one has left"
            yield what, f"wait for it, or end its processes: kill {' '.join(map(str, holders))}"
        else:
            yield (
                f"stale: {path} is locked, and no process on this host holds it",
                "end the sweep on the host where it runs (squeue); if that host is gone, its file server frees it",
            )


CHECKS: tuple[Check, ...] = (
    devices,
    shared_gpus,
    thread_number,
    threads_and_cores,
    ranks_and_cores,
    memory,
    temporary_files,
    run_folder,
    locking,
    stale_files,
)


def _number(omp: str) -> int:
    """The threads of OMP_NUM_THREADS, which may be a list for nested loops; 0 if it is no number."""
    first = omp.split(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def _threads(one: RankFacts) -> int:
    """The most threads that a rank starts; without OMP_NUM_THREADS a library starts one for each core."""
    of_libraries = len(one.machine.cores) if one.machine.omp is None else _number(one.machine.omp)
    return max(of_libraries, one.settings.threads)


def _num_cores(group: Sequence[RankFacts]) -> int:
    """How many cores the ranks have together; 0 if unknown."""
    return len(set().union(*(one.machine.cores for one in group)))


def _ranks(group: Sequence[RankFacts]) -> str:
    return counted(len(group), "rank")
