"""What is shown: a row for each rank, what most ranks have in common with the ranks that differ, and the problems."""

from collections.abc import Callable, Sequence

from rich.table import Table

from pflmpi.doctor.facts import RankFacts
from pflmpi.doctor.problems import Problem, by, line, numbers
from pflmpi.terminal import table_console
from pflmpi.text import counted, scaled_bytes, size, some, spans

_ROWS = 16  # ranks that have a row of their own; more ranks share the rows of those that are alike
_WIDTH = 120  # where there is no terminal


def show(everyone: Sequence[RankFacts], problems: Sequence[Problem]) -> None:
    """Print the tables and the problems."""
    # Plain text: mpirun gives its ranks a terminal of no size, and forwards what they write to wherever its own goes.
    terminal = table_console(_WIDTH, force_terminal=False, highlight=False)
    terminal.print(_ranks(everyone))
    terminal.print(_common(everyone))
    show_problems(everyone, problems)


def show_problems(everyone: Sequence[RankFacts], problems: Sequence[Problem]) -> None:
    """Print each problem in a line of its own, however long, or that there is none."""
    for problem in problems:
        print(f"problem: {line(problem, everyone)}")
    if not problems:
        print("no problems found")


def _ranks(everyone: Sequence[RankFacts]) -> Table:
    table = Table("rank", "host", "device", "free memory", "threads", "cores", "clock, ms ahead")
    groups = by(everyone, _row if len(everyone) > _ROWS else lambda one: (str(one.rank),))
    for group in groups.values():
        memory = min((one.machine for one in group), key=lambda each: each.memory_free)
        cores = {one.machine.cores for one in group}
        table.add_row(
            spans(numbers(group)),
            some(list(dict.fromkeys(one.host for one in group)), most=2),
            _device(min(group, key=lambda one: one.device.memory_free)),
            _free(memory.memory_free, memory.memory),
            _threads(group[0]),
            spans(min(cores)) if len(cores) == 1 else f"{len(min(cores))} each",
            _clock(max(group, key=lambda one: abs(one.clock.ahead))),
        )
    return table


def _row(one: RankFacts) -> tuple[str, ...]:
    """What ranks in the same row have in common."""
    return one.device.name, str(one.machine.memory >> 30), _threads(one), str(len(one.machine.cores))


def _device(one: RankFacts) -> str:
    if not one.device.uuid:
        return one.device.name or "none"
    return f"{one.device.name}, {_free(one.device.memory_free, one.device.memory)}"


def _free(free: int, total: int) -> str:
    return f"{free / scaled_bytes(total)[0]:.3g} of {size(total)}"


def _threads(one: RankFacts) -> str:
    return f"{one.settings.threads}, OMP {'not set' if one.machine.omp is None else one.machine.omp}"


def _clock(one: RankFacts) -> str:
    return f"{1000 * one.clock.ahead:.1f} within {1000 * one.clock.within:.1f}" if one.rank else "0"


def _common(everyone: Sequence[RankFacts]) -> Table:
    table = Table("", "", "ranks", show_header=False)
    for name, text in _TEXTS.items():
        for value, group in by(everyone, text).items():
            table.add_row(name, value, "all" if len(group) == len(everyone) else spans(numbers(group)))
    free = {
        "run folder": [one.folder.free for one in everyone if not one.folder.error],
        "temporary files": [one.machine.temporary_free for one in everyone],
        "/dev/shm": [one.machine.shared_free for one in everyone if one.machine.shared_free is not None],
    }
    least = ", ".join(f"{name} {size(min(sizes))}" for name, sizes in free.items() if sizes)
    table.add_row("least free space", least, "all")
    return table


def _launcher(one: RankFacts) -> str:
    names = {"mpi": "mpirun or srun with MPI", "slurm": "srun without MPI", "alone": "nothing"}
    return f"{names.get(one.launcher, one.launcher)}, {counted(one.size, 'rank')}" + (
        ", not connected" if one.connection else ""
    )


def _mpi(one: RankFacts) -> str:
    if one.mpi.error:
        return f"none ({one.mpi.error})"
    if not one.mpi.library:
        return "not used"
    buffers = {None: "unknown", True: "yes", False: "no"}[one.mpi.device_buffers]
    return f"{one.mpi.library}; sends GPU buffers: {buffers}"


def _folder(one: RankFacts) -> str:
    if one.folder.error:
        return f"{one.folder.path}: {one.folder.error}"
    same = {True: "the same for all ranks; ", False: "not rank 0's; ", None: ""}[
        one.folder.seen if one.size > 1 else None
    ]
    locks = f"HDF5 locks: {one.folder.hdf5 or 'yes'}; flock: {one.folder.flock or 'yes'}"
    return f"{one.folder.path}: written; {same}{locks}"


def _data(one: RankFacts) -> str:
    if one.data.error:
        return "missing, to be downloaded" if one.data.download else "missing"
    if one.data.name:
        return f"{one.data.name}: {one.data.files} files in {one.data.root}" if one.data.files else one.data.name
    return one.data.root or "no data folder is set"


_TEXTS: dict[str, Callable[[RankFacts], str]] = {
    "started by": _launcher,
    "MPI": _mpi,
    "torch.distributed": lambda one: f"gloo: {'yes' if one.device.gloo else 'no'}; NCCL: {one.device.nccl or 'no'}",
    "messages to GPUs": lambda one: one.device.messages or "not used",
    "Slurm": lambda one: ", ".join(f"{name} {text}" for name, text in one.slurm.items() if text) or "no job",
    "run folder": _folder,
    "data": _data,
    "versions": lambda one: ", ".join(f"{name} {version or 'missing'}" for name, version in one.versions.items()),
}
