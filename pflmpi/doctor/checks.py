"""Checks of the facts of all ranks: what may be wrong, and what to do about it."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pflmpi.doctor.facts import PACKAGES, RankFacts
from pflmpi.text import format_bytes, format_ranks, join_truncated, pluralize
from pflmpi.transports.detect import LAUNCHERS

T = TypeVar("T", bound=Hashable)
Group = Sequence[RankFacts]
Find = Callable[[Group], Iterable[tuple[str, Group]]]  # from the checked ranks to problems, each with its ranks

_MEMORY = 256 << 20  # bytes that a rank needs at least, besides its libraries
_SHARED = 32 << 20  # bytes of /dev/shm per rank, for messages of MPI and NCCL within a host
_DISK = 1 << 30  # bytes for checkpoints at least; `pflmpi plan` says how many a run needs
_LAUNCHERS = {**LAUNCHERS, "unclear": "a launcher"}


@dataclass(frozen=True)
class Check:
    """A check of the facts of all ranks.

    Attributes:
        applies: whether a rank is checked.
        find: finds the problems of the checked ranks; a text with `{fields}` of the facts is a problem of each of them.
        remedy: what to do, or "" if the problem says it; or a function of the affected ranks and all ranks.
    """

    applies: Callable[[RankFacts], bool]
    find: str | Find
    remedy: str | Callable[[Group, Group], str]


@dataclass(frozen=True)
class Problem:
    """A problem, its remedy, and the ranks that have it."""

    what: str
    remedy: str
    ranks: tuple[int, ...]

    def line(self, all_ranks: Group) -> str:
        """Formats the problem in one line, with ranks and hosts."""
        hosts = list(dict.fromkeys(facts.host for facts in all_ranks if facts.rank in self.ranks))
        text = "; ".join(filter(None, (self.what, self.remedy))).replace("\n", " ")
        return f"{format_ranks(self.ranks)} on {join_truncated(hosts)}: {text}"


def find_problems(all_ranks: Group) -> list[Problem]:
    """Runs all checks; equal problems of several ranks are merged."""
    problems: dict[tuple[str, str], set[int]] = {}
    for check in CHECKS:
        for what, group in run_check(check, all_ranks):
            remedy = check.remedy if isinstance(check.remedy, str) else check.remedy(group, all_ranks)
            problems.setdefault((what, remedy), set()).update(rank_numbers(group))
    return [Problem(what, remedy, tuple(sorted(ranks))) for (what, remedy), ranks in problems.items()]


def run_check(check: Check, all_ranks: Group) -> list[tuple[str, Group]]:
    """Returns the problems that a check finds, each with its ranks."""
    checked = [facts for facts in all_ranks if check.applies(facts)]
    if isinstance(check.find, str):
        return [(check.find.format(**dict(facts)), [facts]) for facts in checked]
    return list(check.find(checked))


def group_by(all_ranks: Iterable[RankFacts], key: Callable[[RankFacts], T]) -> dict[T, list[RankFacts]]:
    groups: dict[T, list[RankFacts]] = {}
    for facts in all_ranks:
        groups.setdefault(key(facts), []).append(facts)
    return groups


def rank_numbers(group: Iterable[RankFacts]) -> tuple[int, ...]:
    return tuple(facts.rank for facts in group)


def advise_connection(mpi: bool) -> str:
    network = "OMPI_MCA_btl_tcp_if_include" if mpi else "GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
    return (
        "see in the launcher's output whether all ranks have started, check for a firewall between the hosts, and name "
        f"the network that connects them ({network})"
    )


def _every_rank(_: RankFacts) -> bool:
    return True


def _per_host(text: Callable[[Group], str]) -> Find:
    """Finds problems host by host; `text` returns "" for a host without one."""

    def find(all_ranks: Group) -> Iterator[tuple[str, Group]]:
        for group in group_by(all_ranks, lambda facts: facts.host).values():
            if problem := text(group):
                yield problem, group

    return find


def _find_minority(text: str, value: Callable[[RankFacts], str]) -> Find:
    """Finds the ranks whose value is not the most frequent one (in a tie, that of the lowest rank).

    Args:
        text: the problem, with `{here}` and `{there}` for the two values and `{others}` for the ranks of the majority.
    """

    def find(all_ranks: Group) -> Iterator[tuple[str, Group]]:
        groups = group_by(all_ranks, value)
        majority = max(groups, key=lambda value: len(groups[value]), default="")
        for here, group in groups.items():
            if here != majority:
                others = format_ranks(rank_numbers(groups[majority]))
                yield text.format(here=here, there=majority, others=others), group

    return find


def _check_version(package: str) -> Check:
    value = _find_minority(f"{package} is {_VALUES_DIFFER}", lambda facts: facts.versions.get(package) or "missing")
    return Check(_every_rank, value, _ENVIRONMENT)


def _is_split_world(facts: RankFacts) -> bool:
    """Whether the launcher has started more ranks than MPI sees, so that each is a world of its own."""
    return facts.mpi.used and 0 < facts.mpi.world != facts.size


def _find_split_worlds(all_ranks: Group) -> Iterator[tuple[str, Group]]:
    for facts in all_ranks:
        launcher, world = _LAUNCHERS[facts.launcher], facts.mpi.world
        worlds = f"{facts.size} worlds of size {world}"
        yield f"{launcher} has started {facts.size} ranks, but MPI sees {world}: {worlds}", [facts]


def _advise_launcher(group: Group, _: Group) -> str:
    facts = group[0]
    own = f"the mpirun of {facts.mpi.library}"
    if not facts.slurm:
        return f"start with {own}: `which mpirun` shows which one this was"
    flag = "srun --mpi=pmix" if "Open MPI" in facts.mpi.library else "srun --mpi=pmi2"
    return f"start with {flag} (`srun --mpi=list` shows what this Slurm has), or {own}"


def _find_broken_packages(all_ranks: Group) -> Iterator[tuple[str, Group]]:
    """Finds packages that cannot be imported, except torch: without it a rank has no device, which is checked."""
    for facts in all_ranks:
        for name, why in facts.broken.items():
            if name != "torch":
                yield f"{name} cannot be imported ({why})", [facts]


def _lacks_data(facts: RankFacts) -> bool:
    return bool(facts.data.error) and not facts.data.download


def _advise_data(_: Group, all_ranks: Group) -> str:
    with_data = [facts.rank for facts in all_ranks if not _lacks_data(facts) and facts.data.root]
    if not with_data:
        return "set data.root or PFLMPI_DATA to a folder that all hosts see at the same path"
    return (
        f"{format_ranks(with_data)} can read it: make the folder visible at the same path on all hosts, and export "
        "PFLMPI_DATA in the batch script (mpirun passes it on with -x PFLMPI_DATA)"
    )


def _find_shared_gpus(all_ranks: Group) -> Iterator[tuple[str, Group]]:
    for (_, uuid), group in group_by(all_ranks, lambda facts: (facts.host, facts.device.uuid)).items():
        if len(group) > 1:
            yield f"{_format_count(group)} share one GPU ({group[0].device.name}, {uuid})", group


def _count_omp_threads(facts: RankFacts) -> int:
    """Threads by OMP_NUM_THREADS, which may be a list for nested loops; 0 if it is no number."""
    first = (facts.machine.omp or "").split(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def _count_threads(facts: RankFacts) -> int:
    """Threads that a rank starts at most; without OMP_NUM_THREADS a library starts one for each core."""
    return max(
        len(facts.machine.cores) if facts.machine.omp is None else _count_omp_threads(facts), facts.settings.threads
    )


def _count_cores(group: Group) -> int:
    """Cores that the ranks have together; 0 if unknown."""
    return len(set().union(*(facts.machine.cores for facts in group)))


def _format_count(group: Group) -> str:
    return pluralize(len(group), "rank")


def _describe_excess_threads(group: Group) -> str:
    num_cores, threads = _count_cores(group), [_count_threads(facts) for facts in group]
    if not num_cores or max(threads) == 1 or sum(threads) <= num_cores:
        return ""
    unset = " (OMP_NUM_THREADS is not set)" if all(facts.machine.omp is None for facts in group) else ""
    each = " each" if len(group) > 1 else ""
    return f"{_format_count(group)} with {max(threads)} threads{each}{unset} on {pluralize(num_cores, 'core')}"


def _advise_threads(group: Group, _: Group) -> str:
    threads = max(_count_cores(group) // len(group), 1)
    setting = f" and set runtime.threads={threads}" if any(facts.settings.threads > threads for facts in group) else ""
    return f"export OMP_NUM_THREADS={threads}{setting}, or give them more cores (--cpus-per-task)"


def _describe_excess_ranks(group: Group) -> str:
    cores = _count_cores(group)
    return f"{_format_count(group)} on {pluralize(cores, 'core')}" if 0 < cores < len(group) else ""


def _describe_low_memory(group: Group) -> str:
    free = min(facts.machine.memory_free for facts in group)
    if not any(facts.machine.memory for facts in group) or free >= _MEMORY * len(group):
        return ""
    return f"{format_bytes(free)} of memory are left for {_format_count(group)}, and each needs {format_bytes(_MEMORY)}"


def _describe_low_shared_memory(group: Group) -> str:
    free = min(facts.machine.shared_free or 0 for facts in group)
    is_low = len(group) > 1 and free < _SHARED * len(group)
    return f"/dev/shm has {format_bytes(free)} left for the messages of {_format_count(group)}" if is_low else ""


_VALUES_DIFFER = "{here} here, and {there} on {others}"
_ENVIRONMENT = (
    "use one environment on all hosts: on a shared file system, activated or module-loaded in the batch script"
)
_REINSTALL = "install the package again (pip install --force-reinstall NAME), alike on all hosts"
_SHARED_FILE = "keep it on a file system that all hosts share"
_OTHER_FOLDER = "choose a folder (--out) on a file system that all hosts share and that you can write"

CHECKS = (  # causes before their consequences
    Check(
        lambda facts: bool(
            facts.mpi.error and (facts.mpi.used or facts.settings.transport == "mpi" or facts.versions.get("mpi4py"))
        ),
        "MPI cannot be used ({mpi.error})",
        "load the cluster's MPI module and pip install mpi4py, or pip install 'pflmpi[mpi]', which installs both; "
        "torchrun, and srun without --mpi, need no MPI",
    ),
    Check(_is_split_world, _find_split_worlds, _advise_launcher),
    Check(
        lambda facts: facts.launcher == "unclear",
        "it is unclear how this was started ({connection})",
        "unset the variables that an earlier launch has left in the environment, and start with one launcher",
    ),
    Check(
        lambda facts: bool(
            facts.launcher != "unclear" and facts.connection and not facts.mpi.error and not _is_split_world(facts)
        ),
        "no connection to the other ranks ({connection})",
        lambda group, _: advise_connection(group[0].mpi.used),
    ),
    Check(
        lambda facts: facts.launcher == "alone" and facts.slurm.get("tasks", "") not in ("", "0", "1"),
        "Slurm has given this job {slurm[tasks]} tasks, but this is one process: a world of size 1, on one node",
        "start with srun pflmpi ... (torch.distributed), srun --mpi=pmix (Open MPI), srun --mpi=pmi2 (MPICH), mpirun",
    ),
    *map(_check_version, ("python", "pflmpi", *PACKAGES)),
    Check(_every_rank, _find_broken_packages, _REINSTALL),
    Check(
        lambda facts: facts.mpi.used and bool(facts.mpi.library),
        _find_minority(f"MPI is {_VALUES_DIFFER}", lambda facts: facts.mpi.library),
        _ENVIRONMENT,
    ),
    Check(
        lambda facts: bool(facts.settings.error),
        "the configuration cannot be used here ({settings.error})",
        _SHARED_FILE,
    ),
    Check(
        lambda facts: not facts.settings.error,
        _find_minority("the configuration is not that of {others}", lambda facts: facts.settings.digest),
        _SHARED_FILE,
    ),
    Check(
        lambda facts: bool(facts.device.name) and (facts.rank > 0 or facts.size == 1),  # rank 0 may have no clients
        _find_minority(f"the device is {_VALUES_DIFFER}: results would depend on it", lambda facts: facts.device.name),
        "choose nodes with the same devices (--constraint, --gpus=TYPE:N), or set runtime.device=cpu",
    ),
    Check(_lacks_data, "data: {data.error}", _advise_data),
    Check(
        lambda facts: not _lacks_data(facts),
        _find_minority("data: the files have other sizes or names than on {others}", lambda facts: facts.data.digest),
        "copy the same files to all hosts, or use a folder that they share",
    ),
    Check(
        lambda facts: bool(facts.device.error),
        "{device.error}",
        lambda group, _: _REINSTALL if "torch" in group[0].broken else "",
    ),
    Check(
        lambda facts: bool(facts.device.uuid),
        _find_shared_gpus,
        "give each its own (--ntasks-per-node as many as --gpus-per-node), or start fewer; "
        "clients are shared out among ranks, so one rank per GPU is fastest. Where they must share it, start NVIDIA's "
        "MPS first (nvidia-cuda-mps-control -d); without it they take turns",
    ),
    Check(_every_rank, _per_host(_describe_excess_threads), _advise_threads),
    Check(
        _every_rank,
        _per_host(_describe_excess_ranks),
        lambda group, _: (
            f"start at most {_count_cores(group)} on a host (--ntasks-per-node), or let them have more cores "
            "(--cpus-per-task; mpirun --bind-to none if they were bound to the same ones)"
        ),
    ),
    Check(
        _every_rank,
        _per_host(_describe_low_memory),
        "start fewer ranks on a host, or request more memory (--mem, --mem-per-cpu)",
    ),
    Check(
        lambda facts: facts.machine.shared_free is not None,
        _per_host(_describe_low_shared_memory),
        f"{format_bytes(_SHARED)} per rank are enough: remove old files there, or docker run --shm-size=1g",
    ),
    Check(
        lambda facts: bool(facts.folder.error),
        "the run folder {folder.path} cannot be written ({folder.error})",
        _OTHER_FOLDER,
    ),
    Check(
        lambda facts: not facts.folder.error and facts.folder.seen is False,
        "{folder.path} is not rank 0's run folder: a file that rank 0 made is not there",
        _OTHER_FOLDER,
    ),
    Check(
        lambda facts: facts.folder.lock_seen is False,
        "a lock that rank 0 holds in {folder.path} is not seen here: locks hold on one host only",
        "never start two sweeps in one folder from two hosts, or mount it with locks for all (Lustre: flock)",
    ),
    Check(
        lambda facts: not facts.folder.error and facts.folder.free < _DISK,
        _per_host(
            lambda group: f"{format_bytes(group[0].folder.free)} are left on the file system of {group[0].folder.path}"
        ),
        "free space (see also your quota), or choose another folder (--out)",
    ),
)
