"""All checks, in the order in which problems are shown: what others may follow from comes first."""

from collections.abc import Sequence

from pflmpi.doctor import files, likeness, resources, starting
from pflmpi.doctor.facts import Facts
from pflmpi.doctor.problem import Check, Problem, merged

CHECKS: tuple[Check, ...] = (
    starting.mpi_library,
    starting.worlds,
    starting.connection,
    starting.tasks,
    starting.faults,
    starting.torch_backends,
    likeness.versions,
    likeness.libraries,
    likeness.configuration,
    likeness.clocks,
    resources.devices,
    resources.shared_gpus,
    resources.unlike_devices,
    resources.threads_alike,
    resources.threads_and_cores,
    resources.crowding,
    resources.memory,
    files.run_folder,
    files.locking,
    files.left_behind,
    files.data,
)


def judge(everyone: Sequence[Facts]) -> list[Problem]:
    """Return the problems of all ranks whose facts are known."""
    return merged(problem for check in CHECKS for problem in check(everyone))
