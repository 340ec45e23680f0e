"""Runs the points of a scaling experiment as steps of a Slurm job, or as jobs of their own."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pflmpi.cluster.batch_script import BatchScript, Options, check_setup, merge_options, srun
from pflmpi.errors import ConfigError
from pflmpi.scaling import records
from pflmpi.scaling.experiment import Scaling, folder, runs

_SET_BY_POINTS = ("ntasks", "nodes", "cpus-per-task")  # options of sbatch


@dataclass(frozen=True)
class Allocation:
    """The Slurm job of this process.

    Attributes:
        tasks, nodes: numbers of tasks and nodes of the job.
        mpi: the value of srun's --mpi.
    """

    tasks: int
    nodes: int
    mpi: str

    @property
    def per_node(self) -> int:
        return -(-self.tasks // self.nodes)

    def nodes_of(self, cores: int, ranks: int) -> int:
        """Number of nodes for some ranks: as few as possible, but all of them if ranks share cores; see `launcher`."""
        return min(self.nodes, ranks) if cores else -(-ranks // self.per_node)

    def check(self, cores: int, ranks: int) -> None:
        """Raises `ConfigError` if the job cannot start a point; see `launcher`."""
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
        """The command that starts some ranks as a step of the job.

        Args:
            cores: cores that all ranks share; 0 if each rank has the cores of a task.
        """
        words = [*srun(self.mpi), f"--ntasks={ranks}"]
        nodes = self.nodes_of(cores, ranks)
        on_a_node = -(-ranks // nodes) if cores else min(self.per_node, ranks)
        words += [f"--nodes={nodes}", f"--ntasks-per-node={on_a_node}"]
        return [*words, f"--cpus-per-task={max(cores // ranks, 1)}"] if cores else words


def allocation(environ: Mapping[str, str], mpi: str) -> Allocation | None:
    """The Slurm job of this process; None outside of a job."""
    if "SLURM_JOB_ID" not in environ:
        return None
    nodes = int(environ.get("SLURM_JOB_NUM_NODES") or 1)
    return Allocation(int(environ.get("SLURM_NTASKS") or nodes), nodes, mpi)


def check(given: Options, setup: Path | None) -> None:
    """Raises `ConfigError` for options of sbatch that each point sets, and for a missing setup file."""
    for name in _SET_BY_POINTS:
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
    """A batch script for each point that is not measured completely, by its number of ranks.

    Args:
        words: arguments of `pflmpi`, the same for all points.
        given, others: options of sbatch.
        setup: a file with shell commands that the jobs run first.
    """
    missing = dict.fromkeys(planned.ranks for planned in runs(scaling) if not records.is_measured(planned, out))
    first = str(setup.resolve()) if setup else ""
    return {
        ranks: BatchScript(
            merge_options(_options(ranks, scaling, out, given, mpi), given, others),
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
    options: dict[str, str | None] = {
        "job-name": f"{out.name}-{ranks}",
        "chdir": os.getcwd(),
        "output": str(folder(out, ranks)).replace("%", "%%") + ".%j.log",
        "open-mode": "append",
        "ntasks": str(scaling.ranks[-1] if scaling.cores else ranks),  # in packing mode all points have the same cores
    }
    if scaling.cores:
        tasks = scaling.ranks[-1]
        per_node = given.get("ntasks-per-node") or str(tasks)
        if per_node.isdecimal():  # otherwise sbatch refuses it
            Allocation(tasks, -(-tasks // max(int(per_node), 1)), mpi).check(scaling.cores, ranks)
        options["ntasks-per-node"] = per_node
    return options
