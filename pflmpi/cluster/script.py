"""The batch script of a job: a text that depends on a `BatchScript` alone."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pflmpi.cluster.sbatch import Options, words_of
from pflmpi.errors import ConfigError, RunError, Stopped
from pflmpi.text import spans

_HEAD = """\
# A rank computes with the threads of its configuration, numpy and others with one.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# A rank that waits in Open MPI leaves its core to others.
export OMPI_MCA_mpi_yield_when_idle="${OMPI_MCA_mpi_yield_when_idle:-1}"
# srun does not inherit this from sbatch.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"; fi
"""

_SETUP = """\
# What the job needs besides, such as modules; it may choose another `python`.
python={python}
. {file} || exit 2
"""

_ENDED = """
ended_with $? "$(cat "$PFLMPI_EXIT_FILE" 2> /dev/null)"
rm -f "$PFLMPI_EXIT_FILE\""""

_RESTARTS = """\
for ((restarted = 1; ; restarted++)); do
    {command}
    [ -n "$lost" ] && [ "$restarted" -le {restarts} ] || break
    echo "a rank was lost; all start again from the newest checkpoint ($restarted of {restarts})" >&2
done"""

# Also in launch/settings.
ENDED_WITH = f"""\
# ended_with CODE WORD: set `code` to that of the run, and `lost` to whether a rank was killed or lost. CODE is the
# launcher's; WORD what rank 0 has left: nothing before the ranks connect, "lost" while they run, then their exit code.
ended_with() {{
    code=$1 lost=''
    if [ "$code" -eq 138 ]; then code={Stopped.exit_code}; fi # killed by USR1: the run had not begun
    case "$2" in
        [0-9]*) code=$2 ;;
        lost) lost=yes ;;
        *) if [ "$code" -gt 128 ]; then lost=yes; fi ;;
    esac
    if [ "$code" -eq {Stopped.exit_code} ] || [ "$code" -eq 130 ]; then lost=''; fi
    if [ -n "$lost" ]; then code={RunError.exit_code}; fi
}}
"""

# Also in launch/settings.
REQUEUE = f"""\
# requeue_after CODE OUT NEWEST: if the run was stopped in time, the same job continues when it is scheduled again.
# NEWEST is what `newest OUT` said when it began: five starts in a row that bring no checkpoint are the last.
newest() {{ find "$1" -maxdepth 1 -name 'round_*.h5' 2> /dev/null | sort | tail -n 1; }}
requeue_after() {{
    local empty="$PWD/.pflmpi-empty.$SLURM_JOB_ID"
    if [ "$1" -ne {Stopped.exit_code} ] || [ "$(newest "$2")" != "$3" ]; then rm -f "$empty"; else echo >> "$empty"; fi
    [ "$1" -eq {Stopped.exit_code} ] || return
    if [ -e "$empty" ] && [ "$(wc -l < "$empty")" -ge 5 ]; then
        rm -f "$empty"
        echo "five starts in a row were stopped before a round was complete; not requeued: give the job more --time" >&2
    else
        scontrol requeue "$SLURM_JOB_ID" || echo "Slurm does not requeue this job: submit it again, to continue" >&2
    fi
}}
"""

_REQUEUE_ARRAY = f"""\
if [ "$code" -eq {Stopped.exit_code} ]; then
    # Stopped in time, after a complete round: the same job continues when it is scheduled again.
    scontrol requeue "$SLURM_JOB_ID" || echo "Slurm does not requeue this job; submit it again, and it continues" >&2
fi
"""


@dataclass(frozen=True)
class BatchScript:
    """What a batch script does.

    Attributes:
        options: of sbatch.
        python: the interpreter of the environment with pflmpi.
        arguments: for `pflmpi` on every rank or, in an array, for `pflmpi sweep` once.
        mpi: how srun connects the ranks: none, pmix, pmi2.
        others: words with more options of sbatch, as they are.
        array: whether each task runs one cell of a table.
        once: whether `pflmpi` is started once and starts ranks by itself, with srun.
        requeue: whether a run that was stopped in time requeues its job.
        restarts: how often all ranks start again in the job after one was killed or lost.
        setup: a file that the batch script reads first, such as one that loads modules; "" for none.
    """

    options: Options
    python: str
    arguments: Sequence[str]
    mpi: str = "none"
    others: Sequence[str] = ()
    array: bool = False
    once: bool = False
    requeue: bool = False
    restarts: int = 0
    setup: str = ""


def check_setup(setup: Path | None) -> None:
    """Raise `ConfigError` unless the file of `--setup`, if it is given, is there."""
    if setup is not None and not setup.is_file():
        raise ConfigError(f"--setup {setup}: there is no such file; give one with shell commands")


def script(batch: BatchScript) -> str:
    """Text of the batch script."""
    setup = _SETUP.format(python=shlex.quote(batch.python), file=shlex.quote(batch.setup)) if batch.setup else ""
    lines = [*map(shlex.quote, words_of(batch.options)), shlex.join(words_of({}, batch.others))]
    directives = "".join(f"#SBATCH {line}\n" for line in lines if line)
    head = f"#!/bin/bash\n{directives}\n{_HEAD}{setup}"
    python = '"$python"' if batch.setup else shlex.quote(batch.python)
    command = f"{python} -P -m pflmpi {shlex.join(batch.arguments)}"
    # Without the second option srun lets the other ranks run on when one has failed.
    launcher = shlex.join(["srun", f"--mpi={batch.mpi}", "--kill-on-bad-exit=1"])
    if batch.array:
        command += f' --cell "$SLURM_ARRAY_TASK_ID" --launcher {shlex.quote(launcher)}'
    elif batch.once:
        pass
    else:
        command = f"{launcher} {command}"
    if not (batch.requeue or batch.restarts):
        return "\n".join([head, f"{command}\n"])
    functions = [f'export PFLMPI_EXIT_FILE="$PWD/.pflmpi-exit.$SLURM_JOB_ID"\n{ENDED_WITH}']
    command += _ENDED
    if batch.restarts:
        command = _RESTARTS.format(command=command.replace("\n", "\n    "), restarts=batch.restarts)
    end = 'exit "$code"\n'
    if batch.requeue and batch.array:
        end = _REQUEUE_ARRAY + end
    elif batch.requeue:
        folder = shlex.quote(batch.arguments[batch.arguments.index("--out") + 1])
        functions.append(f"{REQUEUE}before=$(newest {folder})\n")
        end = f'requeue_after "$code" {folder} "$before"\n{end}'
    return "\n".join([head, *functions, f"{command}\n{end}"])


def tasks(numbers: Sequence[int], at_a_time: int | None) -> str:
    """Numbers of an array's tasks as sbatch takes them.

    >>> tasks([0, 1, 2, 5, 7, 8], None), tasks([3], 2)
    ('0-2,5,7-8', '3%2')
    """
    text = spans(numbers).replace(" ", "")
    return text if at_a_time is None else f"{text}%{at_a_time}"
