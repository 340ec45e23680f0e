"""Checks of what must be the same on all ranks: packages, configuration, time, devices, threads, data."""

from collections.abc import Callable, Iterator, Sequence

from pflmpi.doctor.facts import RankFacts
from pflmpi.doctor.problems import Check, Found, Problem, each_host, each_rank, outliers, same_for_all
from pflmpi.text import ranks

_SKEW = 1.0  # seconds between clocks; less does not matter for logs, and job authentication allows minutes
_ONE_ENVIRONMENT = (
    "use one environment on all hosts: on a shared file system, and activated or module-loaded in the batch script"
)
_SHARED = "keep it on a file system that all hosts share"

mpi_libraries = same_for_all("MPI", lambda one: (one.mpi.used and one.mpi.library) or None, _ONE_ENVIRONMENT)
# Rank 0 computes no clients if it alone has no GPU.
device_kinds = same_for_all(
    "the device",
    lambda one: (one.device.name or None) if one.rank > 0 or one.size == 1 else None,
    "choose nodes with the same devices (--constraint, --gpus=TYPE:N), or set runtime.device=cpu",
    why=": results would depend on it",
)
threads = same_for_all(
    "OMP_NUM_THREADS",
    lambda one: "not set" if one.machine.omp is None else one.machine.omp,
    "export it in the batch script; mpirun passes it to other hosts with -x OMP_NUM_THREADS",
)


def versions(everyone: Sequence[RankFacts]) -> Iterator[Problem]:
    """A package has another version on some ranks, or is missing there."""
    for package in dict.fromkeys(name for one in everyone for name in one.versions):
        yield from same_for_all(package, _version(package), _ONE_ENVIRONMENT)(everyone)


@each_rank
def broken_packages(one: RankFacts) -> Found:
    """A package is installed and cannot be imported."""
    for package, reason in one.broken.items():
        if package != "torch":  # without torch a rank has no device, which is a problem already
            remedy = f"install the package again (pip install --force-reinstall {package}), alike on all hosts"
            yield f"{package} cannot be imported ({reason})", remedy


@each_rank
def configuration(one: RankFacts) -> Found:
    """The configuration cannot be used on a rank."""
    if one.settings.error:
        yield f"the configuration cannot be used here ({one.settings.error})", _SHARED


def configurations(everyone: Sequence[RankFacts]) -> Iterator[Problem]:
    """The configuration is another one on some ranks."""
    for outlier in outliers(everyone, lambda one: None if one.settings.error else one.settings.digest):
        yield Problem(f"the configuration is not that of {ranks(outlier.others)}", _SHARED, outlier.ranks)


@each_host
def clocks(group: Sequence[RankFacts]) -> Found:
    """The clock of a host is off."""
    clock = min((one.clock for one in group), key=lambda each: each.within)
    if abs(clock.ahead) - clock.within > _SKEW:
        way = "ahead of" if clock.ahead > 0 else "behind"
        remedy = "check the host's time service (chronyc tracking); until then, times in logs and of files mislead"
        yield f"the clock is {abs(clock.ahead):.1f} s {way} rank 0's", remedy


def data(everyone: Sequence[RankFacts]) -> Iterator[Problem]:
    """The data is missing, or is not the same everywhere."""
    bad = [one for one in everyone if one.data.error and not one.data.download]
    good = [one.rank for one in everyone if one not in bad and one.data.root]
    remedy = "set data.root or PFLMPI_DATA to a folder that all hosts see at the same path"
    if good:
        remedy = (
            f"{ranks(good)} can read it: make the folder visible at the same path on all hosts, and export PFLMPI_DATA "
            "in the batch script (mpirun passes it on with -x PFLMPI_DATA)"
        )
    for one in bad:
        yield Problem(f"data: {one.data.error}", remedy, (one.rank,))
    if bad or not good:
        return
    for outlier in outliers(everyone, lambda one: one.data.root):
        if not (outlier.value and outlier.usual):  # of two paths, both may be right
            here, there = outlier.value or "not set", outlier.usual or "not set"
            remedy = "export it in the batch script, so that all ranks have it (mpirun: -x PFLMPI_DATA)"
            what = f"data: PFLMPI_DATA is {here} here, and {there} on {ranks(outlier.others)}"
            yield Problem(what, remedy, outlier.ranks)
    for outlier in outliers(everyone, lambda one: one.data.digest):
        what = f"data: the files have other sizes or names than on {ranks(outlier.others)}"
        yield Problem(what, "copy the same files to all hosts, or use a folder that they share", outlier.ranks)


CHECKS: tuple[Check, ...] = (
    versions,
    broken_packages,
    mpi_libraries,
    configuration,
    configurations,
    clocks,
    device_kinds,
    threads,
    data,
)


def _version(package: str) -> Callable[[RankFacts], str]:
    return lambda one: one.versions.get(package) or "missing"
