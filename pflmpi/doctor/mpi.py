"""The MPI library: asked in this process where MPI has started it, otherwise in a process of its own."""

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial

from pflmpi.doctor.facts import Mpi
from pflmpi.text import first_line
from pflmpi.transports import mpi_library
from pflmpi.transports.detect import Launch
from pflmpi.transports.process_exit import exit_unconnected

_LIMIT = 30.0  # seconds for MPI to start with one rank
_LAUNCHERS = ("OMPI_COMM_WORLD", "PMI", "PRTE_", "PALS_", "SLURM_")  # how the names of their variables begin


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

        start(_LIMIT, partial(exit_unconnected, rank, {}))
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
                [sys.executable, "-P", "-m", "pflmpi.doctor.mpi"],
                env={**for_one, "TMPDIR": folder},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_LIMIT,
            )
    except subprocess.TimeoutExpired:
        return Mpi(error=f"it did not start within {_LIMIT:.0f} s")
    except OSError as error:
        return Mpi(error=f"it could not be tried: {first_line(error)}")
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return Mpi.model_validate_json(lines[-1]).model_copy(update={"used": False})
    said = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
    return Mpi(error=f"it did not start: {said[-1]}")


if __name__ == "__main__":
    answer = in_this_process()
    if answer.world:
        from pflmpi.transports.mpi import MpiTransport

        MpiTransport(_LIMIT).close()  # without it, MPI may leave shared memory behind
    print(answer.model_dump_json())
