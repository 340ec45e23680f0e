"""Checks of the folder of the run and of the data."""

from collections.abc import Iterator, Sequence

from pflmpi.doctor.facts import Facts
from pflmpi.doctor.problem import Problem, odd
from pflmpi.text import mebibytes, ranks, some

_FREE = 1 << 30  # bytes for checkpoints; `pflmpi plan` says how many a run really takes
_ELSEWHERE = "choose a folder (--out) on a file system that all hosts share and that you can write"


def run_folder(everyone: Sequence[Facts]) -> Iterator[Problem]:
    """The folder cannot be written, is not the same one everywhere, or is nearly full."""
    for one in everyone:
        path, here = one.folder.path, (one.rank,)
        if one.folder.error:
            yield Problem(f"the run folder {path} cannot be written ({one.folder.error})", _ELSEWHERE, here)
            continue
        if one.folder.seen is False:
            yield Problem(f"{path} is not rank 0's run folder: a file that rank 0 made is not there", _ELSEWHERE, here)
        if one.folder.free < _FREE:
            what = f"{mebibytes(one.folder.free)} are left on the file system of {path}"
            yield Problem(what, "free space (see also your quota), or choose another folder (--out)", here)


def locking(everyone: Sequence[Facts]) -> Iterator[Problem]:
    """Files in the run folder cannot be locked."""
    for one in everyone:
        path, here = one.folder.path, (one.rank,)
        if one.folder.hdf5:
            yield Problem(
                f"HDF5 cannot lock files in {path} ({one.folder.hdf5})",
                "export HDF5_USE_FILE_LOCKING=FALSE for programs that read checkpoints; pflmpi itself needs no locks",
                here,
            )
        if one.folder.flock:
            cure = (
                "keep sweeps, which lock their folder, on another file system, or mount it with locks (Lustre: flock)"
            )
            yield Problem(f"files in {path} cannot be locked ({one.folder.flock})", cure, here)
        elif one.folder.seen and one.folder.lock_seen is False:
            yield Problem(
                f"a lock that rank 0 holds in {path} is not seen here: locks hold on one host only",
                "never start two sweeps in one folder from two hosts, or mount it with locks for all (Lustre: flock)",
                here,
            )


def left_behind(everyone: Sequence[Facts]) -> Iterator[Problem]:
    """Processes that are gone have left half-written files, flags or locks in the folder; only rank 0 looks."""
    for one in everyone:
        here = (one.rank,)
        if one.folder.unfinished:
            yield Problem(
                f"stale: {some(one.folder.unfinished)}, left half-written by a process that is gone",
                "once no job writes this run any more (squeue), `pflmpi resume RUN` removes them and goes on",
                here,
            )
        if one.folder.flagged:
            yield Problem(
                f"stale: {some(one.folder.flagged)}, marked as being written by a process that is gone",
                "take the mark away (h5clear --status FILE), then `pflmpi inspect RUN` says whether it is whole; if "
                "not, `pflmpi resume RUN` goes on from the checkpoint before",
                here,
            )
        for path, holders in one.folder.locked.items():
            if holders:
                what = f"{path} is locked by a sweep at work or by what is left of one"
                cure = f"wait for it, or end its processes: kill {' '.join(map(str, holders))}"
            else:
                what = f"stale: {path} is locked, and no process on this host holds it"
                cure = (
                    "end the sweep on the host where it runs (squeue); if that host is gone, its file server frees it"
                )
            yield Problem(what, cure, here)


def data(everyone: Sequence[Facts]) -> Iterator[Problem]:
    """The data is missing, or is not the same everywhere."""
    bad = [one for one in everyone if one.data.error and not one.data.download]
    good = [one.rank for one in everyone if one not in bad and one.data.root]
    for one in bad:
        cure = (
            f"{ranks(good)} can read it: make the folder visible at the same path on all hosts, and export PFLMPI_DATA "
            "in the batch script (mpirun passes it on with -x PFLMPI_DATA)"
            if good
            else "set data.root or PFLMPI_DATA to a folder that all hosts see at the same path"
        )
        yield Problem(f"data: {one.data.error}", cure, (one.rank,))
    if good and not bad:
        yield from _unlike(everyone)


def _unlike(everyone: Sequence[Facts]) -> Iterator[Problem]:
    for few in odd(everyone, lambda one: one.data.root):
        if not (few.value and few.usual):
            seen = f"{few.value or 'not set'} here, and {few.usual or 'not set'} on {ranks(few.others)}"
            cure = "export it in the batch script, so that all ranks have it (mpirun: -x PFLMPI_DATA)"
            yield Problem(f"data: PFLMPI_DATA is {seen}", cure, few.ranks)
    for few in odd(everyone, lambda one: one.data.digest):
        what = f"data: the files have other sizes or names than on {ranks(few.others)}"
        yield Problem(what, "copy the same files to all hosts, or use a folder that they share", few.ranks)
