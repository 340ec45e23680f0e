"""Detecting how this process was started, and its rank, from the variables of launchers.

Their other variables are read where they are needed, such as Slurm's nodes in `transports.slurm`.
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from pflmpi.errors import ConfigError
from pflmpi.transports.slurm import find_rendezvous_address, find_tasks_variable, is_in_step, read_num_tasks


@dataclass(frozen=True)
class Launch:
    """How this process was started.

    Attributes:
        kind: "alone" without a launcher; "slurm" for srun without MPI.
        rank, size: of the whole run.
        address: host:port of the rendezvous for torch, unless torchrun's variables have it; "" if unknown.
        restarts: how often the ranks were restarted by torchrun, a wrapper in launch/, or `pflmpi run`.
        runs: number of earlier runs in this process.
        jobs: restarts by each job or launcher that may restart this process, such as {"Slurm job 77": 1}.
    """

    kind: Literal["alone", "mpi", "torchrun", "slurm"]
    rank: int
    size: int
    address: str = ""
    restarts: int = 0
    runs: int = 0
    jobs: Mapping[str, int] = field(default_factory=dict, compare=False)


ALONE = Launch("alone", 0, 1)
LAUNCHERS = {"alone": "nothing", "mpi": "mpirun or srun", "torchrun": "torchrun", "slurm": "srun"}  # by kind, for texts
RESTARTED = "PFLMPI_RESTARTED"  # variable with the number of restarts of all ranks; set if they may be restarted
_UNNAMED_RUN = "none"  # torchrun's default run id
_OWN_RUN_PREFIX = "pflmpi-"  # of run ids of ranks that pflmpi has started, which no launcher restarts


def new_run_id() -> str:
    """Returns a TORCHELASTIC_RUN_ID for ranks that pflmpi starts itself."""
    return _OWN_RUN_PREFIX + uuid.uuid4().hex


def detect(environ: Mapping[str, str]) -> Launch:
    """Detects how this process was started.

    Raises:
        ConfigError: the variables contradict each other.
    """
    launch = _detect_innermost(environ)
    restarts = _read_count(environ, "TORCHELASTIC_RESTART_COUNT")
    jobs = {}
    if "SLURM_JOB_ID" in environ:
        jobs[f"Slurm job {environ['SLURM_JOB_ID']}"] = _read_count(environ, "SLURM_RESTART_COUNT")
    name = environ.get("TORCHELASTIC_RUN_ID", _UNNAMED_RUN)
    if name != _UNNAMED_RUN and not name.startswith(_OWN_RUN_PREFIX):
        jobs[f"torchrun {name}"] = restarts
    return replace(launch, restarts=restarts + _read_count(environ, RESTARTED), jobs=jobs)


def _detect_innermost(environ: Mapping[str, str]) -> Launch:
    """Detects the innermost launcher.

    torchrun sets its own variables, also inside an MPI or Slurm job. Under mpirun inside a Slurm job, SLURM_PROCID is
    that of mpirun's daemon, so MPI comes before Slurm. A batch script has SLURM_PROCID = 0 and is alone.
    """
    has = environ.keys()
    for_torch = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= has
    if for_torch and ("LOCAL_RANK" in has or "TORCHELASTIC_RUN_ID" in has):
        return _read_launch(environ, "torchrun", "RANK", "WORLD_SIZE")
    if {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"} <= has:
        return _read_launch(environ, "mpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    if {"PMI_RANK", "PMI_SIZE"} <= has:
        return _read_launch(environ, "mpi", "PMI_RANK", "PMI_SIZE")
    if "PMIX_RANK" in has:
        if not is_in_step(environ):
            raise ConfigError(
                "PMIX_RANK is set, but neither OMPI_COMM_WORLD_SIZE nor a Slurm step says how many ranks there are; "
                "start with mpirun, srun or torchrun"
            )
        return _read_step(environ, "mpi", "PMIX_RANK")
    if is_in_step(environ) and read_num_tasks(environ) not in (None, "1"):
        return _read_step(environ, "slurm", "SLURM_PROCID")
    if for_torch:  # started by hand or by a cluster's operator
        return _read_launch(environ, "torchrun", "RANK", "WORLD_SIZE")
    if is_in_step(environ) and environ["SLURM_PROCID"] not in ("", "0"):  # one of several, which must not all run alone
        return _read_step(environ, "slurm", "SLURM_PROCID")  # raises: the number of tasks is 1 or missing
    return ALONE


def _read_step(environ: Mapping[str, str], kind: Literal["mpi", "slurm"], rank: str) -> Launch:
    launch = _read_launch(environ, kind, rank, find_tasks_variable(environ))
    return replace(launch, address=find_rendezvous_address(environ))


def _read_launch(
    environ: Mapping[str, str], kind: Literal["mpi", "torchrun", "slurm"], of_rank: str, of_size: str
) -> Launch:
    """Reads rank and size from the named variables."""
    rank, size = _read_number(environ, of_rank), _read_number(environ, of_size)
    if rank >= size:
        raise ConfigError(
            f"the launcher's variables contradict each other: {of_rank} = {rank} of {of_size} = {size}; unset what an "
            "earlier launch has left"
        )
    return Launch(kind, rank, size)


def _read_count(environ: Mapping[str, str], name: str) -> int:
    return _read_number(environ, name) if name in environ else 0


def _read_number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdecimal():
        value = f"= {text!r} in the environment" if name in environ else "is not set"
        raise ConfigError(f"{name} {value}; expected a number of 0 or more, as the launcher sets it")
    return int(text)
