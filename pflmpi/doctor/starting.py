"""Checks of how the ranks were started and connected."""

from collections.abc import Iterator, Sequence

from pflmpi.doctor.facts import Facts
from pflmpi.doctor.problem import Problem

_BY = {"mpi": "mpirun or srun", "torchrun": "torchrun", "slurm": "srun", "alone": "nothing", "unclear": "a launcher"}
_FT = "start with launch/mpirun --ft -n R (mpirun --with-ft ulfm --mca coll ^han,adapt, in a job too, not srun)"


def connection(everyone: Sequence[Facts]) -> Iterator[Problem]:
    """A rank has no connection to the others, for a reason that no other check names."""
    for one in everyone:
        if one.launcher == "unclear":
            cure = "unset what an earlier launch has left in the environment, and start anew with one launcher"
            yield Problem(f"how this was started is unclear ({one.connection})", cure, (one.rank,))
        elif one.connection and not one.mpi.error and not _worlds_of_one(one):
            what = f"it has no connection to the other ranks ({one.connection})"
            yield Problem(what, cure_of_no_connection(one.mpi.used), (one.rank,))


def cure_of_no_connection(mpi: bool) -> str:
    """Return what to look at when ranks do not find each other."""
    network = "OMPI_MCA_btl_tcp_if_include" if mpi else "GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
    return (
        "see in the launcher's output whether all ranks have started, whether a firewall lies between the hosts, and "
        f"name the network that connects them ({network})"
    )


def mpi_library(everyone: Sequence[Facts]) -> Iterator[Problem]:
    """MPI is asked for, or mpi4py is installed, and it does not work."""
    for one in everyone:
        if one.mpi.error and (one.mpi.used or one.asked.transport == "mpi" or one.versions.get("mpi4py")):
            yield Problem(
                f"MPI cannot be used ({one.mpi.error})",
                "load the cluster's MPI module and pip install mpi4py, or pip install 'pflmpi[mpi]', which brings "
                "both; torchrun, and srun without --mpi, need no MPI",
                (one.rank,),
            )


def worlds(everyone: Sequence[Facts]) -> Iterator[Problem]:
    """The launcher has started more ranks than MPI sees: each is a world of its own."""
    for one in everyone:
        if _worlds_of_one(one):
            seen = f"MPI sees {one.mpi.world}: {one.size} worlds of size {one.mpi.world}"
            what = f"{_BY[one.launcher]} has started {one.size} ranks, but {seen}"
            yield Problem(what, _right_launcher(one), (one.rank,))


def tasks(everyone: Sequence[Facts]) -> Iterator[Problem]:
    """Slurm has given the job several tasks, and this is one process without the others."""
    for one in everyone:
        given = one.slurm.get("tasks", "")
        if one.launcher == "alone" and given.isdecimal() and int(given) > 1:
            yield Problem(
                f"Slurm has given this job {given} tasks, but this is one process: a world of size 1, on one node",
                "start with srun pflmpi ... (torch.distributed), srun --mpi=pmix (Open MPI), srun --mpi=pmi2 (MPICH), "
                "or mpirun",
                (one.rank,),
            )


def faults(everyone: Sequence[Facts]) -> Iterator[Problem]:
    """`faults: continue` is asked for without what it needs."""
    for one in everyone:
        if one.asked.faults != "continue" or one.mpi.error:
            continue
        wish, here = "runtime.faults = 'continue'", (one.rank,)
        if one.mpi.library and not one.mpi.fault_tolerance:
            cure = "use a library that was (the Open MPI of pip install 'pflmpi[mpi]'), or runtime.faults=stop"
            yield Problem(f"{wish}, but {one.mpi.library} was built without ULFM", cure, here)
        elif not one.mpi.used:
            yield Problem(f"{wish} needs MPI's ranks, but {_BY[one.launcher]} has started this", _FT, here)
        elif not one.mpi.fault_tolerant:
            yield Problem(f"{wish}, but the ranks were started without the settings for it", _FT, here)


def torch_backends(everyone: Sequence[Facts]) -> Iterator[Problem]:
    """torch.distributed is what connects the ranks, and has no backend that can."""
    for one in everyone:
        nccl = bool(one.device.nccl and one.device.uuid)
        by_torch = one.launcher in ("torchrun", "slurm") or one.asked.transport == "torch"
        if by_torch and not one.mpi.used and "torch" not in one.broken and not (one.device.gloo or nccl):
            what = "torch.distributed has neither gloo nor, for a GPU, NCCL"
            yield Problem(what, "install a torch that was built with them, as the published ones are", (one.rank,))


def _worlds_of_one(one: Facts) -> bool:
    return one.mpi.used and 0 < one.mpi.world != one.size


def _right_launcher(one: Facts) -> str:
    open_mpi, own = "Open MPI" in one.mpi.library, f"the mpirun of {one.mpi.library}"
    if one.slurm:
        flag = "srun --mpi=pmix" if open_mpi else "srun --mpi=pmi2"
        return f"start with {flag} (`srun --mpi=list` shows what this Slurm has), or {own}"
    return f"start with {own}: `which mpirun` shows which one this was"
