"""Points of a scaling experiment as steps of a Slurm job, and as jobs."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pflmpi.cluster.batch_script import BatchScript, Options, check_setup, merged, srun
from pflmpi.errors import ConfigError
from pflmpi.scaling import records
from pflmpi.scaling.experiment import Scaling, folder, runs

_OF_POINTS = ("ntasks", "nodes", "cpus-per-task")


@dataclass(frozen=True)
class Allocation:
    """The job that this process is in.

    Attributes:
        tasks, nodes: of the job.
        mpi: how srun connects ranks.
    """

    tasks: int
    nodes: int
    mpi: str

    @property
    def per_node(self) -> int:
        return -(-self.tasks // self.nodes)

    def nodes_of(self, cores: int, ranks: int) -> int:
        """Nodes of so many ranks: as few as possible, or all where they share cores; see `launcher`."""
        return min(self.nodes, ranks) if cores else -(-ranks // self.per_node)

    def check(self, cores: int, ranks: int) -> None:
        """Raise if the job cannot start a point; see `launcher`."""
        threads, on_a_node = max(cores // ranks, 1), -(-ranks // self.nodes_of(cores, ranks))
        if cores and threads * on_a_node > self.per_node:
            raise ConfigError(
                f"--ranks {ranks} in packing mode: {on_a_node} on a node, with {threads} threads each, and this job "
                f"has {self.per_node} tasks on a node; put as many on each as the largest number of ranks "
                f"(--ntasks-per-node={self.tasks})"
            )
        if ranks > self.tasks:
            raise ConfigError(
                f"--ranks {ranks}, and this job has {self.tasks} tasks; ask for more (--ntasks), or give at most "
                f"{self.tasks}"
            )

    def launcher(self, cores: int, ranks: int) -> list[str]:
        """The words that start so many ranks as a step of the job.

        Args:
            cores: that all ranks share; 0 where each has what the job gives a task.
        """
        words = [*srun(self.mpi), f"--ntasks={ranks}"]
        nodes = self.nodes_of(cores, ranks)
        on_a_node = -(-ranks // nodes) if cores else min(self.per_node, ranks)
        words += [f"--nodes={nodes}", f"--ntasks-per-node={on_a_node}"]
        return [*words, f"--cpus-per-task={max(cores // ranks, 1)}"] if cores else words


def allocation(environ: Mapping[str, str], mpi: str) -> Allocation | None:
    """The Slurm job that this process is in; None outside of one."""
    if "SLURM_JOB_ID" not in environ:
        return None
    nodes = int(environ.get("SLURM_JOB_NUM_NODES") or 1)
    return Allocation(int(environ.get("SLURM_NTASKS") or nodes), nodes, mpi)


def check(given: Options, setup: Path | None) -> None:
    """Raise for options of sbatch that follow from each point, and for a file that is not there."""
    for name in _OF_POINTS:
        if name in given:
            raise ConfigError(
                f"--{name}={given[name]} with --submit: each point is a job with as many tasks as ranks; leave it out, "
                "and say with --ntasks-per-node how many a node takes"
            )
    if auto := [name for name, value in given.items() if value == "auto"]:
        raise ConfigError(f"--{auto[0]}=auto is for `pflmpi submit`; give what each point needs")
    check_setup(setup)


def asks_for_gpus(given: Options, others: Sequence[str]) -> bool:
    return "gpus-per-node" in given or any("gpu" in word or word.startswith("-G") for word in others)


def jobs(
    scaling: Scaling,
    out: Path,
    words: Sequence[str],
    given: Options,
    others: Sequence[str],
    mpi: str,
    setup: Path | None,
) -> dict[int, BatchScript]:
    """A job for each point that is not measured, by its ranks.

    Args:
        words: of `pflmpi`, for all points.
        given, others: options of sbatch.
        setup: a file with shell commands that the jobs run first.
    """
    missing = dict.fromkeys(planned.ranks for planned in runs(scaling) if not records.is_measured(planned, out))
    first = str(setup.resolve()) if setup else ""
    return {
        ranks: BatchScript(
            merged(_options(ranks, scaling, out, given, mpi), given, others),
            sys.executable,
            [*words, "--only", str(ranks)],
            mpi,
            others,
            once=True,
            setup=first,
        )
        for ranks in missing
    }


def _options(ranks: int, scaling: Scaling, out: Path, given: Options, mpi: str) -> dict[str, str | None]:
    place = folder(out, ranks)
    ours: dict[str, str | None] = {
        "job-name": f"{out.name}-{ranks}",
        "chdir": os.getcwd(),
        "output": str(place).replace("%", "%%") + ".%j.log",
        "open-mode": "append",
        "ntasks": str(scaling.ranks[-1] if scaling.cores else ranks),  # in packing mode all points share as many cores
    }
    if scaling.cores:
        tasks = scaling.ranks[-1]
        per_node = given.get("ntasks-per-node") or str(tasks)
        if per_node.isdecimal():  # sbatch says what else it is
            Allocation(tasks, -(-tasks // max(int(per_node), 1)), mpi).check(scaling.cores, ranks)
        ours["ntasks-per-node"] = per_node
    return ours
