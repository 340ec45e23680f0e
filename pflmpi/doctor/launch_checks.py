"""Checks of how the ranks were started and connected."""

from pflmpi.doctor.facts import RankFacts
from pflmpi.doctor.problems import Check, Found, each_rank
from pflmpi.transports.detect import LAUNCHERS

_LAUNCHERS = {**LAUNCHERS, "unclear": "a launcher"}


@each_rank
def mpi_library(one: RankFacts) -> Found:
    """MPI is requested, or mpi4py is installed, and it does not work."""
    if one.mpi.error and (one.mpi.used or one.settings.transport == "mpi" or one.versions.get("mpi4py")):
        yield (
            f"MPI cannot be used ({one.mpi.error})",
            "load the cluster's MPI module and pip install mpi4py, or pip install 'pflmpi[mpi]', which installs both; "
            "torchrun, and srun without --mpi, need no MPI",
        )


@each_rank
def world_size(one: RankFacts) -> Found:
    """The launcher has started more ranks than MPI sees: each is a world of its own."""
    if _split_world(one):
        open_mpi, own = "Open MPI" in one.mpi.library, f"the mpirun of {one.mpi.library}"
        remedy = f"start with {own}: `which mpirun` shows which one this was"
        if one.slurm:
            flag = "srun --mpi=pmix" if open_mpi else "srun --mpi=pmi2"
            remedy = f"start with {flag} (`srun --mpi=list` shows what this Slurm has), or {own}"
        seen = f"MPI sees {one.mpi.world}: {one.size} worlds of size {one.mpi.world}"
        yield f"{_LAUNCHERS[one.launcher]} has started {one.size} ranks, but {seen}", remedy


@each_rank
def connection(one: RankFacts) -> Found:
    """A rank has no connection to the others, for a reason that no other check names."""
    if one.launcher == "unclear":
        remedy = "unset the variables that an earlier launch has left in the environment, and start with one launcher"
        yield f"it is unclear how this was started ({one.connection})", remedy
    elif one.connection and not one.mpi.error and not _split_world(one):
        yield f"no connection to the other ranks ({one.connection})", remedy_of_no_connection(one.mpi.used)


@each_rank
def slurm_tasks(one: RankFacts) -> Found:
    """Slurm has given the job several tasks, and this is one process without the others."""
    tasks = one.slurm.get("tasks", "")
    if one.launcher == "alone" and tasks.isdecimal() and int(tasks) > 1:
        yield (
            f"Slurm has given this job {tasks} tasks, but this is one process: a world of size 1, on one node",
            "start with srun pflmpi ... (torch.distributed), srun --mpi=pmix (Open MPI), srun --mpi=pmi2 (MPICH), or "
            "mpirun",
        )


@each_rank
def torch_backends(one: RankFacts) -> Found:
    """torch.distributed connects the ranks, and has no backend that can."""
    by_torch = one.launcher in ("torchrun", "slurm") or one.settings.transport == "torch"
    usable = one.device.gloo or (one.device.nccl and one.device.uuid)
    if by_torch and not one.mpi.used and "torch" not in one.broken and not usable:
        remedy = "install a torch that was built with them, as the published ones are"
        yield "torch.distributed has neither gloo nor, for a GPU, NCCL", remedy


CHECKS: tuple[Check, ...] = (mpi_library, world_size, connection, slurm_tasks, torch_backends)


def remedy_of_no_connection(mpi: bool) -> str:
    """What to do when ranks do not find each other."""
    network = "OMPI_MCA_btl_tcp_if_include" if mpi else "GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
    return (
        "see in the launcher's output whether all ranks have started, check for a firewall between the hosts, and name "
        f"the network that connects them ({network})"
    )


def _split_world(one: RankFacts) -> bool:
    return one.mpi.used and 0 < one.mpi.world != one.size
