"""Collecting the facts: first each rank by itself, then what only ranks together can find out."""

import socket
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

from pflmpi.doctor import leftovers, mpi
from pflmpi.doctor.clocks import clocks
from pflmpi.doctor.dataset import dataset
from pflmpi.doctor.device import device
from pflmpi.doctor.facts import Asked, Facts, Mpi
from pflmpi.doctor.machine import machine
from pflmpi.doctor.run_folder import beacon, look
from pflmpi.doctor.software import versions
from pflmpi.doctor.wanted import Wanted
from pflmpi.transports.base import Transport
from pflmpi.transports.detect import Launch
from pflmpi.transports.slurm import in_step, num_tasks
from pflmpi.transports.text import from_root, gather_texts

_SLURM = {
    "job": "SLURM_JOB_ID",
    "step": "SLURM_STEP_ID",
    "nodes": "SLURM_JOB_NODELIST",
    "gpus": "SLURM_STEP_GPUS",
    "mpi": "SLURM_MPI_TYPE",
}


def by_itself(launch: Launch, wanted: Wanted, environ: Mapping[str, str]) -> Facts:
    """Return what this rank finds out without the others, and before it is connected to them: the slow part."""
    found, broken = versions()
    return Facts(
        rank=launch.rank,
        size=launch.size,
        launcher=launch.kind,
        host=socket.gethostname(),
        asked=wanted.asked,
        machine=machine(environ),
        device=device(launch, wanted.runtime, wanted.training, environ),
        data=dataset(wanted.data, wanted.partition, environ),
        slurm=_slurm(environ),
        versions=found,
        broken=broken,
    )


def unconnected(facts: Facts, launch: Launch, folder: Path, environ: Mapping[str, str], error: str) -> Facts:
    """Return what this rank knows when it cannot be connected to the others."""
    library = mpi_of(launch, facts.asked, environ)
    return facts.model_copy(update={"connection": error, "mpi": library, "folder": look(folder, "")})


def together(
    facts: Facts, transport: Transport, launch: Launch, folder: Path, environ: Mapping[str, str]
) -> list[Facts]:
    """Return the facts of all ranks on rank 0, [] on the others.

    Raises:
        TransportError: a rank was lost, or did not answer in time.
    """
    root = transport.rank == 0
    before = leftovers.unfinished(folder) if root else {}
    library = mpi_of(launch, facts.asked, environ)
    with beacon(folder) if root else nullcontext("") as name:
        place = look(folder, from_root(transport, name))
        transport.barrier()  # all have looked
    time = clocks(transport)
    if root:
        place = place.model_copy(
            update={
                "unfinished": leftovers.abandoned(before, leftovers.unfinished(folder)),
                "flagged": leftovers.flagged(folder),
                "locked": leftovers.locked(folder),
            }
        )
    mine = facts.model_copy(update={"mpi": library, "folder": place})
    texts = gather_texts(transport, mine.model_dump_json()) or []
    everyone = [Facts.model_validate_json(text) for text in texts]
    return [one.model_copy(update={"clock": clock}) for one, clock in zip(everyone, time, strict=True)]


def mpi_of(launch: Launch, asked: Asked, environ: Mapping[str, str]) -> Mpi:
    """Return the MPI library that connects the ranks; without a launcher, the one that is there."""
    if launch.kind == "alone":
        return mpi.elsewhere(environ)
    connects = launch.kind == "mpi" if asked.transport == "auto" else asked.transport == "mpi"
    if connects and launch.kind != "torchrun":  # whose ranks MPI cannot connect; asking would start it
        return mpi.here().model_copy(update={"fault_tolerant": launch.fault_tolerant})
    return Mpi()


def _slurm(environ: Mapping[str, str]) -> dict[str, str]:
    if "SLURM_JOB_ID" not in environ:
        return {}
    found = {name: environ.get(variable, "") for name, variable in _SLURM.items()}
    if not in_step(environ):
        found["step"] = ""
    return {**found, "tasks": num_tasks(environ) or ""}
