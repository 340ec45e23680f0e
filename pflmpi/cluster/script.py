"""The batch script of a job: a text that depends on a `BatchScript` alone."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from pflmpi.cluster.sbatch import Options, words_of
from pflmpi.errors import Stopped
from pflmpi.text import spans

_HEAD = """\
# A rank computes with the threads of its configuration, numpy and others with one.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# A rank that waits in Open MPI leaves its core to others.
export OMPI_MCA_mpi_yield_when_idle="${OMPI_MCA_mpi_yield_when_idle:-1}"
# srun does not inherit this from sbatch.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"; fi
"""

_REQUEUE = f"""\
code=$?
if [ "$code" -eq {Stopped.exit_code} ]; then
    # Stopped in time, after a complete round: the same job continues when it is scheduled again.
    scontrol requeue "$SLURM_JOB_ID" || echo "Slurm does not requeue this job; submit it again, and it continues" >&2
fi
exit "$code"
"""


@dataclass(frozen=True)
class BatchScript:
    """What a batch script does.

    Attributes:
        options: of sbatch.
        python: the interpreter of the environment with pflmpi.
        arguments: for `pflmpi` on every rank or, in an array, for `pflmpi sweep` once.
        mpi: how srun connects the ranks: none, pmix, pmi2.
        array: whether each task runs one cell of a table.
        requeue: whether a run that was stopped in time requeues its job.
    """

    options: Options
    python: str
    arguments: Sequence[str]
    mpi: str = "none"
    array: bool = False
    requeue: bool = False


def script(batch: BatchScript) -> str:
    """Text of the batch script."""
    directives = "".join(f"#SBATCH {shlex.quote(word)}\n" for word in words_of(batch.options))
    # Without the second option srun lets the other ranks run on when one has failed.
    launcher = ["srun", f"--mpi={batch.mpi}", "--kill-on-bad-exit=1"]
    command = shlex.join([batch.python, "-m", "pflmpi", *batch.arguments])
    if batch.array:
        command += f' --cell "$SLURM_ARRAY_TASK_ID" --launcher {shlex.quote(shlex.join(launcher))}'
    else:
        command = f"{shlex.join(launcher)} {command}"
    return f"#!/bin/bash\n{directives}\n{_HEAD}\n{command}\n{_REQUEUE if batch.requeue else ''}"


def tasks(numbers: Sequence[int], at_a_time: int | None) -> str:
    """Numbers of an array's tasks as sbatch takes them.

    >>> tasks([0, 1, 2, 5, 7, 8], None), tasks([3], 2)
    ('0-2,5,7-8', '3%2')
    """
    text = spans(numbers).replace(" ", "")
    return text if at_a_time is None else f"{text}%{at_a_time}"
