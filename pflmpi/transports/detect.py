"""How this process was started, and its rank: the only place that reads the launchers' variables."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pflmpi.errors import ConfigError
from pflmpi.transports.slurm import in_step, meeting_point, num_tasks, tasks_here


@dataclass(frozen=True)
class Launch:
    """What a launcher says about this process.

    Attributes:
        kind: "alone" without a launcher; "slurm" for srun without MPI.
        rank, size: of the whole run.
        local_rank, local_size: on this node.
        address: host:port where torch's ranks meet, unless torchrun says so; "" if unknown.
        restarts: how often torchrun has restarted the ranks.
        fault_tolerant: whether mpirun was started with ULFM, so that ranks can continue when one dies, and with
            settings that work.
    """

    kind: Literal["alone", "mpi", "torchrun", "slurm"]
    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str = ""
    restarts: int = 0
    fault_tolerant: bool = False


ALONE = Launch("alone", 0, 1, 0, 1)


def detect(environ: Mapping[str, str]) -> Launch:
    """How this process was started.

    Raises:
        ConfigError: the variables contradict each other.
    """
    launch = _innermost(environ)
    return replace(
        launch,
        restarts=_number(environ, "TORCHELASTIC_RESTART_COUNT") if "TORCHELASTIC_RESTART_COUNT" in environ else 0,
        fault_tolerant=environ.get("OMPI_MCA_mpi_ft_enable") == "1" and environ.get("OMPI_MCA_coll") == "^han,adapt",
    )


def _innermost(environ: Mapping[str, str]) -> Launch:
    """How the innermost launcher started this process.

    torchrun sets its own variables, also inside an MPI or Slurm job. Under mpirun inside a Slurm job, SLURM_PROCID is
    that of mpirun's daemon, so MPI comes before Slurm. A batch script has SLURM_PROCID = 0 and is alone.
    """
    has = environ.keys()
    for_torch = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= has
    if for_torch and ("LOCAL_RANK" in has or "TORCHELASTIC_RUN_ID" in has):
        return _launch(environ, "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"} <= has:
        names = (f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
        return _launch(environ, "mpi", *names)
    if {"PMI_RANK", "PMI_SIZE"} <= has:
        return _launch(environ, "mpi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    if "PMIX_RANK" in has:
        if not in_step(environ):
            raise ConfigError(
                "PMIX_RANK is set, but neither OMPI_COMM_WORLD_SIZE nor a Slurm step says how many ranks there are; "
                "start with mpirun, srun or torchrun"
            )
        return _step(environ, "mpi", "PMIX_RANK")
    if in_step(environ) and num_tasks(environ) not in (None, "1"):
        return _step(environ, "slurm", "SLURM_PROCID")
    if for_torch:  # started by hand or by a cluster's operator
        return _launch(environ, "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return ALONE


def _step(environ: Mapping[str, str], kind: Literal["mpi", "slurm"], rank: str) -> Launch:
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    here = tasks_here(environ)
    known = {**environ, "tasks on this node": str(here)} if here else environ
    found = _launch(known, kind, rank, size, "SLURM_LOCALID", "tasks on this node")
    return Launch(kind, found.rank, found.size, found.local_rank, found.local_size, meeting_point(environ))


def _launch(environ: Mapping[str, str], kind: Literal["mpi", "torchrun", "slurm"], *names: str) -> Launch:
    """Rank, size, local rank and local size from the named variables; the last two may be missing."""
    rank, size = _number(environ, names[0]), _number(environ, names[1])
    # If nothing says it, assume all ranks are on this node: the same on all ranks, and right for blocks of ranks.
    local_rank, local_size = rank, size
    if names[2] in environ:
        local_rank = _number(environ, names[2])
        local_size = _number(environ, names[3]) if names[3] in environ else size
    elif in_step(environ) and "SLURM_LOCALID" in environ:
        local_rank = _number(environ, "SLURM_LOCALID")
        local_size = tasks_here(environ) or size
    if not (rank < size and local_rank < local_size <= size):
        raise ConfigError(
            f"the launcher's variables contradict each other: {names[0]} = {rank} of {names[1]} = {size}, "
            f"on this node {local_rank} of {local_size}; unset what an earlier launch has left"
        )
    return Launch(kind, rank, size, local_rank, local_size)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdecimal():
        raise ConfigError(
            f"{name} = {text!r} in the environment; expected a number of 0 or more, as the launcher sets it"
        )
    return int(text)
