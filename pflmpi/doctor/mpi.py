"""What MPI there is: asked in this process where MPI has started it, otherwise in a process of its own."""

import subprocess
import sys
import tempfile
from collections.abc import Mapping

from pflmpi.doctor.facts import Mpi
from pflmpi.text import first_line
from pflmpi.transports import mpi_library

_LIMIT = 30.0  # seconds for MPI to start with one rank
_OF_LAUNCHERS = ("OMPI_COMM_WORLD", "PMI", "PRTE_", "PALS_", "SLURM_")  # how the names of their variables begin


def here() -> Mpi:
    """Return what MPI says in this process; it is started if it was not."""
    try:
        from pflmpi.transports import mpi
    except (ImportError, RuntimeError, OSError) as error:
        return Mpi(used=True, error=first_line(error))
    return _asked(mpi.world_size())


def elsewhere(environ: Mapping[str, str]) -> Mpi:
    """Return what MPI says in a process of its own, with one rank: starting it may end a process, or never end."""
    for_one = {name: text for name, text in environ.items() if not name.startswith(_OF_LAUNCHERS)}
    command = [sys.executable, "-m", "pflmpi.doctor.mpi"]
    try:
        with tempfile.TemporaryDirectory() as folder:  # Open MPI leaves empty folders behind
            done = subprocess.run(
                command,
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


def _asked(world: int) -> Mpi:
    library = mpi_library.loaded()
    if library is None:
        return Mpi(used=True, library="unknown", world=world)
    return Mpi(
        used=True,
        library=library.name,
        world=world,
        device_buffers=library.device_buffers,
        fault_tolerance=library.fault_tolerance,
    )


def _main() -> None:
    answer = here()
    if answer.world:
        from pflmpi.transports.mpi import MpiTransport

        MpiTransport(_LIMIT).close()  # without an end in order it may leave shared memory behind
    print(answer.model_dump_json())


if __name__ == "__main__":
    _main()
