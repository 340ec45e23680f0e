"""Checks of what must be the same on all ranks: versions, the configuration, the time."""

from collections.abc import Callable, Iterator, Sequence

from pflmpi.doctor.facts import Facts
from pflmpi.doctor.problem import Problem, hosts, numbers, odd
from pflmpi.text import ranks

_SKEW = 1.0  # seconds; less does not matter for logs, and authentication of jobs allows minutes
_ONE_ENVIRONMENT = (
    "use one environment on all hosts: on a shared file system, and activated or module-loaded in the batch script"
)


def versions(everyone: Sequence[Facts]) -> Iterator[Problem]:
    """A package has another version on some ranks, is missing, or does not load."""
    for package in dict.fromkeys(name for one in everyone for name in one.versions):
        for few in odd(everyone, _version(package)):
            what = f"{package} is {few.value} here, and {few.usual} on {ranks(few.others)}"
            yield Problem(what, _ONE_ENVIRONMENT, few.ranks)
    for one in everyone:
        for package, reason in one.broken.items():
            if package != "torch":  # without torch a rank has no device, which is a problem already
                cure = f"install the package again (pip install --force-reinstall {package}), alike on all hosts"
                yield Problem(f"{package} cannot be imported ({reason})", cure, (one.rank,))


def libraries(everyone: Sequence[Facts]) -> Iterator[Problem]:
    """The ranks have loaded different MPI libraries."""
    loaded = [one for one in everyone if one.mpi.used and one.mpi.library]
    for few in odd(loaded, lambda one: one.mpi.library):
        what = f"MPI is {few.value} here, and {few.usual} on {ranks(few.others)}"
        yield Problem(what, _ONE_ENVIRONMENT, few.ranks)


def configuration(everyone: Sequence[Facts]) -> Iterator[Problem]:
    """The configuration cannot be used on a rank, or is another one there."""
    for one in everyone:
        if one.asked.error:
            what = f"the configuration cannot be used here ({one.asked.error})"
            yield Problem(what, "keep it on a file system that all hosts share", (one.rank,))
    read = [one for one in everyone if not one.asked.error]
    for few in odd(read, lambda one: one.asked.digest):
        what = f"the configuration is another one than on {ranks(few.others)}"
        yield Problem(what, "keep it on a file system that all hosts share", few.ranks)


def clocks(everyone: Sequence[Facts]) -> Iterator[Problem]:
    """The clock of a host is off."""
    for group in hosts(everyone).values():
        clock = min((one.clock for one in group), key=lambda each: each.within)
        if abs(clock.ahead) - clock.within > _SKEW:
            way = "ahead of" if clock.ahead > 0 else "behind"
            yield Problem(
                f"the clock is {abs(clock.ahead):.1f} s {way} rank 0's",
                "have the host's time service looked at (chronyc tracking); until then times of logs and files mislead",
                numbers(group),
            )


def _version(package: str) -> Callable[[Facts], str]:
    return lambda one: one.versions.get(package) or "missing"
