"""Checks of cores, threads, memory and GPUs."""

from collections.abc import Iterator, Sequence

from pflmpi.doctor.facts import Facts
from pflmpi.doctor.problem import Problem, by, hosts, numbers, odd
from pflmpi.text import mebibytes, ranks

_MEMORY = 256 << 20  # bytes a rank still needs once its libraries are loaded, for the smallest models
_SHARED = 32 << 20  # bytes of /dev/shm a rank: what MPI and NCCL take for messages within a host
_TEMPORARY = 64 << 20  # bytes for the sockets and sessions of launchers
_NO_GPU = ("", "-1", "NoDevFiles")  # of CUDA_VISIBLE_DEVICES: none is wanted


def threads_alike(everyone: Sequence[Facts]) -> Iterator[Problem]:
    """OMP_NUM_THREADS is not the same everywhere, or no number."""
    for one in everyone:
        if one.machine.omp is not None and not _number(one.machine.omp):
            what = f"OMP_NUM_THREADS = {one.machine.omp!r} is no number of threads"
            yield Problem(what, "export OMP_NUM_THREADS=1", (one.rank,))
    for few in odd(everyone, lambda one: "not set" if one.machine.omp is None else one.machine.omp):
        yield Problem(
            f"OMP_NUM_THREADS is {few.value} here, and {few.usual} on {ranks(few.others)}",
            "export it in the batch script; mpirun passes it on to other hosts with -x OMP_NUM_THREADS",
            few.ranks,
        )


def threads_and_cores(everyone: Sequence[Facts]) -> Iterator[Problem]:
    """The ranks of a host start more threads than they have cores."""
    for group in hosts(everyone).values():
        cores = _cores(group)
        threads = [_threads(one) for one in group]
        if not cores or max(threads) == 1 or sum(threads) <= cores:
            continue
        # Without the variable a library starts a thread for each core.
        how = " (OMP_NUM_THREADS is not set)" if all(one.machine.omp is None for one in group) else ""
        each = f"{max(threads)} threads" + (" each" if len(group) > 1 else "")
        fitting = max(cores // len(group), 1)
        cure = f"export OMP_NUM_THREADS={fitting}"
        if any(one.asked.threads > fitting for one in group):
            cure += f" and set runtime.threads={fitting}"
        what = f"{_count(group)} with {each}{how} on {_of_cores(cores)}"
        yield Problem(what, f"{cure}, or give them more cores (--cpus-per-task)", numbers(group))


def crowding(everyone: Sequence[Facts]) -> Iterator[Problem]:
    """A host has more ranks than cores for them."""
    for group in hosts(everyone).values():
        cores = _cores(group)
        if 0 < cores < len(group):
            cure = (
                f"start at most {cores} on a host (--ntasks-per-node), or let them have more cores (--cpus-per-task; "
                "mpirun --bind-to none if they were bound to the same ones)"
            )
            yield Problem(f"{_count(group)} on {_of_cores(cores)}", cure, numbers(group))


def memory(everyone: Sequence[Facts]) -> Iterator[Problem]:
    """Too little memory, shared memory or temporary space is left on a host."""
    for group in hosts(everyone).values():
        here, free = numbers(group), min(one.machine.memory_free for one in group)
        if any(one.machine.memory for one in group) and free < _MEMORY * len(group):
            what = f"{mebibytes(free)} of memory are left for {_count(group)}, and each needs {mebibytes(_MEMORY)}"
            yield Problem(what, "start fewer ranks on a host, or ask for more memory (--mem, --mem-per-cpu)", here)
        shared = [one.machine.shared_free for one in group if one.machine.shared_free is not None]
        if len(group) > 1 and shared and min(shared) < _SHARED * len(group):
            what = f"/dev/shm has {mebibytes(min(shared))} left for the messages of {_count(group)}"
            cure = f"{mebibytes(_SHARED)} a rank are enough: remove old files there, or docker run --shm-size=1g"
            yield Problem(what, cure, here)
        for one in group:
            if one.machine.temporary_free < _TEMPORARY:
                where = one.machine.temporary or "no folder for temporary files can be written"
                what = f"{where}: {mebibytes(one.machine.temporary_free)} left"
                yield Problem(what, "free space there, or set TMPDIR to a folder of this host with more", (one.rank,))


def devices(everyone: Sequence[Facts]) -> Iterator[Problem]:
    """A rank cannot compute where it should."""
    for one in everyone:
        visible = one.device.visible
        if one.device.error:
            cure = "see with nvidia-smi whether the GPU is free and its driver fits torch, or set runtime.device=cpu"
            if "torch" in one.broken:
                cure = "install the package again (pip install --force-reinstall torch), alike on all hosts"
            yield Problem(one.device.error, cure, (one.rank,))
        elif visible is not None and visible not in _NO_GPU and not one.device.gpus and one.asked.device != "cpu":
            yield Problem(
                f"CUDA_VISIBLE_DEVICES = {visible!r}, but torch finds no GPU",
                "see with nvidia-smi whether the driver works, install a torch that was built for CUDA, or set "
                "runtime.device=cpu",
                (one.rank,),
            )


def shared_gpus(everyone: Sequence[Facts]) -> Iterator[Problem]:
    """Several ranks of a host compute on one GPU."""
    for group in by(everyone, lambda one: (one.host, one.device.uuid)).values():
        if len(group) > 1 and group[0].device.uuid:
            what = f"{_count(group)} share one GPU ({group[0].device.name}, {group[0].device.uuid})"
            cure = (
                "give each its own (--ntasks-per-node as many as GPUs, --gpus-per-task=1 or --gpus-per-node), or start "
                "fewer; clients are shared out among ranks, so one rank a GPU is fastest"
            )
            yield Problem(what, cure, numbers(group))


def unlike_devices(everyone: Sequence[Facts]) -> Iterator[Problem]:
    """Some ranks that compute clients do it on another kind of device than others."""
    computing = [one for one in everyone if one.device.name and (one.rank > 0 or one.size == 1)]
    for few in odd(computing, lambda one: one.device.name):
        what = f"the device is {few.value} here, and {few.usual} on {ranks(few.others)}: results would depend on it"
        yield Problem(
            what, "choose nodes that are alike (--constraint, --gpus=TYPE:N), or set runtime.device=cpu", few.ranks
        )


def _number(omp: str) -> int:
    """Return the threads of OMP_NUM_THREADS, which may be a list for nested loops; 0 if it is no number."""
    first = omp.split(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def _threads(one: Facts) -> int:
    by_libraries = len(one.machine.cores) if one.machine.omp is None else _number(one.machine.omp)
    return max(by_libraries, one.asked.threads)


def _cores(group: Sequence[Facts]) -> int:
    """Return how many cores the ranks have together; 0 if that is unknown."""
    return len(set().union(*(one.machine.cores for one in group)))


def _count(group: Sequence[Facts]) -> str:
    return f"{len(group)} rank{'s' if len(group) > 1 else ''}"


def _of_cores(count: int) -> str:
    return f"{count} core{'s' if count > 1 else ''}"
