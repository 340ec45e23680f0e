"""Options of sbatch, and the batch script of a job as a pure function of a `BatchScript`."""

import argparse
import getpass
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pflmpi.errors import ConfigError, Stopped
from pflmpi.text import format_ranges, pluralize

# sbatch options that `submit` has too, with their letters. Others go after `--`; `--requeue` is an option of our own.
KNOWN = {
    "nodes": "N",
    "ntasks": "n",
    "ntasks-per-node": "",
    "cpus-per-task": "c",
    "gpus-per-node": "",
    "time": "t",
    "mem": "",
    "partition": "p",
    "account": "A",
    "qos": "q",
    "output": "o",
}
_RESOLUTION = 60  # seconds: Slurm may send a signal up to this much earlier
_DEFAULT_WARNING = 60  # seconds before the time limit, where --signal names none
_NO_ID = "does not print the id of the job, which is recorded with its run; leave it out"
_WAITS = "ends with the exit code of the job; leave it out, and wait by `pflmpi status RUN --wait`"
# Options of sbatch after which it does not say what `submit` has to know, and what to do.
_REFUSED = {
    "-Q": _NO_ID,
    "--quiet": _NO_ID,
    "-W": _WAITS,
    "--wait": _WAITS,
    "--test-only": "submits nothing; `pflmpi submit --test-only` says when the job would start",
}
# Variables of sbatch for options that `submit` has to know.
_VARIABLES = {"error": "SBATCH_ERROR", "partition": "SBATCH_PARTITION", "time": "SBATCH_TIMELIMIT"}

Options = Mapping[str, str | None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Registers the options of sbatch that `submit` knows; those after `--` are in `options.sbatch`."""
    about = "others go after --, such as: -- --exclusive; GPUs best as: --gpus-per-node=N ... -- --gpu-bind=none"
    group = parser.add_argument_group("options of sbatch", about)
    for name, letter in KNOWN.items():
        group.add_argument(*([f"-{letter}"] if letter else []), f"--{name}", metavar="X")


def collect_options(options: argparse.Namespace) -> Options:
    """Options of `KNOWN` on the command line, by their long names."""
    values = {name: getattr(options, name.replace("-", "_")) for name in KNOWN}
    return {name: value for name, value in values.items() if value is not None}


def effective_options(options: argparse.Namespace, environ: Mapping[str, str]) -> Options:
    """Options on the command line, and before them those that variables of sbatch set and `submit` has to know."""
    variables = {name: environ[variable] for name, variable in _VARIABLES.items() if environ.get(variable)}
    return {**variables, **collect_options(options)}


def resolve_options(options: Options, others: Sequence[str]) -> Options:
    """The options that sbatch will see: known ones among the words of `others` override those of `options`.

    >>> resolve_options({"ntasks": "4", "mem": "1G"}, ["-n8", "--exclusive", "--error", "a.err"])
    {'ntasks': '8', 'mem': '1G', 'error': 'a.err'}
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name, letter in {**KNOWN, "job-name": "J", "error": "e", "chdir": "D", "signal": ""}.items():
        parser.add_argument(*([f"-{letter}"] if letter else []), f"--{name}", nargs="?", dest=name)
    return {**options, **vars(parser.parse_known_args(list(others))[0])}


def refuse_unknown(words: Sequence[str], command: str) -> None:
    """Raise for words before `--` that the command does not know."""
    if words and not words[0].startswith("-"):
        raise ConfigError(f"unexpected argument {words[0]!r}: {command} takes one CONFIG")
    if words:
        raise ConfigError(
            f"unknown option {words[0]!r}; `pflmpi {command} --help` lists those that are known, and sbatch's own go "
            f"after --, as they are: pflmpi {command} ... -- {words[0]}"
        )


def check_warning(time: str, warning: str) -> None:
    """Raise if Slurm would send a warning such as USR1@120 not to the ranks, or as soon as the job starts."""
    target, _, signal = warning.rpartition(":")
    if "B" in target.upper():
        raise ConfigError(
            f"--requeue with --signal={warning}: B: is for the batch script alone, which that signal kills; the "
            f"ranks are to stop after their round, so give it in the form --signal={signal}"
        )
    seconds = signal.partition("@")[2] or str(_DEFAULT_WARNING)
    limit = parse_time(time)
    if limit is not None and seconds.isdecimal() and limit <= (needed := int(seconds) + _RESOLUTION):
        raise ConfigError(
            f"--requeue with --time={time}: Slurm warns the run {seconds} s before the limit, or up to a "
            f"minute earlier, so a job of {limit} s would be stopped as it starts; give a --time of more than "
            f"{-(-needed // 60)} minutes, or a later warning (-- --signal=USR1@SECONDS)"
        )


def parse_time(text: str) -> int | None:
    """Seconds of a time as `--time` takes it and Slurm prints it; None for no limit, and for text that is no time.

    >>> parse_time("30"), parse_time("1:30"), parse_time("2:00:00"), parse_time("1-12"), parse_time("UNLIMITED")
    (1800, 90, 7200, 129600, None)
    """
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in [*parts, *([days] if dash else [])]) or len(parts) > 3:
        return None
    # Slurm's forms: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S.
    units = [3600, 60, 1] if dash or len(parts) == 3 else [60, 1]
    clock_seconds = sum(int(part) * unit for part, unit in zip(parts, units, strict=False))
    return clock_seconds + 86400 * int(days or 0) or None  # 0 is no limit


def merge_options(ours: Options, given: Options, others: Sequence[str]) -> Options:
    """The options of a job: the user's override ours; name and logs are also taken from the words of `others`.

    Patterns in the folder of a log are expanded, because that folder must exist before the job starts, when Slurm has
    not given the job a number yet.

    >>> merge_options({"job-name": "digits"}, {"output": "logs/%x/%j.out"}, ["-e%x/err"])
    {'job-name': 'digits', 'output': 'logs/digits/%j.out', 'error': 'digits/err'}
    """
    if refused := [word for word in others if word in _REFUSED]:
        raise ConfigError(f"{refused[0]}: sbatch then {_REFUSED[refused[0]]}")
    options, last = {**ours, **given}, resolve_options({**ours, **given}, others)
    if (folder := last.get("chdir")) != ours.get("chdir"):
        raise ConfigError(
            f"--chdir={folder}: a job works in the folder where it is submitted, from which its configuration, its run "
            f"and its log are named; leave it out, and submit from {folder}"
        )
    name = options["job-name"] = last.get("job-name") or ""
    for kind in ("output", "error"):
        if (pattern := last.get(kind)) and pattern != ours.get(kind):
            options[kind] = _in_known_folder(kind, pattern, name)
    return options


def _in_known_folder(kind: str, pattern: str, job_name: str) -> str:
    """The pattern of a log, with those in its folder expanded."""
    folder, slash, file = pattern.rpartition("/")
    values = {"%x": job_name.replace("%", "%%"), "%u": getpass.getuser()}
    folder = re.sub("%[%xu]", lambda match: values.get(match[0], "%%"), folder)
    if unknown := re.search("%[^%]", folder.replace("%%", "")):
        raise ConfigError(
            f"--{kind}={pattern}: the folder of a log must exist before the job starts, when nobody knows what "
            f"{unknown[0]} stands for; there use %x (the job's name) and %u (yours), in the file's name all others"
        )
    return f"{folder}{slash}{file}"


def count_ranks(options: Options, threads: int) -> tuple[int | None, str]:
    """Number of ranks of a job (None if it depends on the nodes), and the same in words ("" if --ntasks says it).

    Args:
        options: from `resolve_options`.
        threads: of a rank.

    >>> count_ranks({"nodes": "2"}, 1), count_ranks({"ntasks": "1", "cpus-per-task": "8"}, 2)
    ((2, '2 ranks, 1 on each node'), (4, '4 ranks, which 1 task of 8 cores starts'))
    """
    tasks = options.get("ntasks")
    nodes, per_node = (options.get(name) or "1" for name in ("nodes", "ntasks-per-node"))
    if tasks is None and (nodes, per_node) != ("1", "1"):
        number = int(nodes) * int(per_node) if nodes.isdecimal() and per_node.isdecimal() else None
        return number, f"{f'{number} ' if number else ''}ranks, {per_node} on each node"
    if tasks not in (None, "1"):
        return int(tasks) if tasks.isdecimal() else None, ""
    if gpus := options.get("gpus-per-node"):
        count = gpus.rpartition(":")[2]  # without the model, as in a100:4
        number = int(count) if count.isdecimal() else None
        return number, f"a rank for each of {gpus} GPUs (on CPU: for each core), which 1 task starts"
    cores = options.get("cpus-per-task") or ""
    if cores.isdecimal():
        number = max(int(cores) // threads, 1)
        return number, f"{pluralize(number, 'rank')}, which 1 task of {pluralize(int(cores), 'core')} starts"
    return None, "a rank for each core (1 without --cpus-per-task, or those of a whole node), which 1 task starts"


def log_folders(options: Options) -> list[Path]:
    """Folders of a job's logs; they must exist before the job starts."""
    names = (options.get(kind) for kind in ("output", "error"))
    return [Path(name.replace("%%", "%")).parent for name in names if name]


def drop_job_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for sbatch, which is to submit one job and not to wait for it.

    Without the variables of the job that this process is in, which would constrain another job.
    """
    environ = {name: value for name, value in environ.items() if name not in ("SBATCH_ARRAY_INX", "SBATCH_WAIT")}
    if "SLURM_JOB_ID" not in environ:
        return environ
    of_cluster = ("SLURM_CONF", "SLURM_JWT")  # Slurm's commands need them
    of_job = ("SLURM_", "SRUN_", "SBATCH_CPU_BIND", "SBATCH_MEM_BIND")
    return {name: value for name, value in environ.items() if name in of_cluster or not name.startswith(of_job)}


def format_options(options: Options, others: Sequence[str] = ()) -> list[str]:
    """Options as words of a command line, those in `others` last, so that they win.

    >>> format_options({"nodes": "2", "requeue": None}, ["--gres", "gpu:2"])
    ['--nodes=2', '--requeue', '--gres', 'gpu:2']
    """
    words = [f"--{name}" if value is None else f"--{name}={value}" for name, value in options.items()]
    for word in [*words, *others]:
        if "\n" in word or "\\" in word:
            raise ConfigError(f"{word!r}: sbatch cannot read a line break or a backslash here; choose other names")
    return [*words, *others]


# The launch wrappers; in a checkout this is a link to launch/.
LAUNCH = Path(__file__).parents[1] / "included" / "launch"

_SETUP = """\
# What the job needs besides, such as modules; it may activate another environment, or choose another `python`.
python={python} active_before=${{VIRTUAL_ENV:-}}${{CONDA_PREFIX:-}} submitted_in=$PWD
. {file} || {{
    echo "pflmpi: the setup file" {file} "ended with status $?; its last command must succeed" >&2
    exit 2
}}
set +e # which it may have set: what follows looks at exit codes
cd "$submitted_in" || exit 2 # from which the configuration and the run are named; it may have gone elsewhere
if [ "$python" = {python} ] && [ "${{VIRTUAL_ENV:-}}${{CONDA_PREFIX:-}}" != "$active_before" ]; then
    python=$(command -v python)
fi
"""

_REQUEUE_ARRAY = f"""\
code=$?
if [ "$code" -eq {Stopped.exit_code} ]; then
    # Stopped in time, after a round or before the first: the same job continues when it is scheduled again. After
    # five stops in a row without a new round `pflmpi sweep` ends with 3 instead.
    # The last task has the array's own id as its $SLURM_JOB_ID, by which scontrol would requeue all tasks.
    scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID" ||
        echo "Slurm does not requeue this job; submit it again, and it continues" >&2
fi
exit "$code"
"""


@dataclass(frozen=True)
class BatchScript:
    """Everything that a batch script depends on.

    Attributes:
        python: the interpreter of the environment with pflmpi.
        arguments: for `pflmpi` on every rank or, in an array, for `pflmpi sweep` once.
        mpi: how srun connects the ranks: none, pmix, pmi2.
        others: further sbatch options, as words.
        array: whether each task of a job array runs a cell of a table.
        once: whether `pflmpi` is started once and starts its ranks itself, with srun.
        requeue: whether the job is requeued when its run stops before the time limit.
        restarts: how often all ranks are restarted within the job after one was killed or lost.
        setup: a shell file that the script sources first, for example to load modules; "" for none.
        srun: further srun options, and the words that start a rank in a container, such as `apptainer exec IMAGE`.
        rank_python: the interpreter of the ranks if it is another one, as in a container; "" if not.
        remark: a comment at the top of the script; "" for none.
        planned_memory: bytes that `plan` counted for a node; 0 if it was not asked.
        packs: the cells of each task of an array, if a task runs several in turn; its number is that of the first.
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
    srun: Sequence[str] = ()
    rank_python: str = ""
    remark: str = ""
    planned_memory: int = 0
    packs: Sequence[Sequence[int]] = ()


def check_setup(setup: Path | None) -> None:
    """Raise `ConfigError` unless the file of `--setup`, if it is given, is there."""
    if setup is not None and not setup.is_file():
        raise ConfigError(f"--setup {setup}: there is no such file; give one with shell commands")


def format_script(batch: BatchScript) -> str:
    setup = _SETUP.format(python=shlex.quote(batch.python), file=shlex.quote(batch.setup)) if batch.setup else ""
    lines = [*map(shlex.quote, format_options(batch.options)), shlex.join(format_options({}, batch.others))]
    directives = "".join(f"#SBATCH {line}\n" for line in lines if line)
    remark = f"# {batch.remark}\n" if batch.remark else ""
    head = f"#!/bin/bash\n{directives}{remark}\n{setup}"
    python, rank_python = '"$python"' if batch.setup else shlex.quote(batch.python), shlex.quote(batch.rank_python)
    command = f"-P -m pflmpi {shlex.join(batch.arguments)}"
    launcher = shlex.join([*srun(batch.mpi, batch.restarts), *batch.srun])
    if batch.packs:
        head += (
            f"cells=({' '.join(f'[{pack[0]}]={format_tasks(pack, None)}' for pack in batch.packs)}) # of each task\n"
        )
    if batch.array:
        cell = "${cells[SLURM_ARRAY_TASK_ID]}" if batch.packs else "$SLURM_ARRAY_TASK_ID"
        command = f'{python} {command} --cell "{cell}" --launcher {shlex.quote(launcher)}'
        command += f" --python {rank_python}" if batch.rank_python else ""
    elif batch.once:
        command = f"{python} {command}"
    else:
        command = f"{launcher} {rank_python if batch.rank_python else python} {command}"
    if not batch.requeue:
        return f"{head}{command}\n"
    if batch.array:
        return f"{head}{command}\n{_REQUEUE_ARRAY}"
    folder = shlex.quote(batch.arguments[batch.arguments.index("--out") + 1])
    before = f". {shlex.quote(str(LAUNCH / 'settings'))}\nbefore=$(newest {folder})\n"
    return f'{head}{before}{command}\ncode=$?\nrequeue_after "$code" {folder} "$before"\nexit "$code"\n'


def srun(mpi: str, restarts: int = 0) -> list[str]:
    """The words of launch/srun, which starts ranks as a job step and ends with the exit code of their run."""
    return ["bash", str(LAUNCH / "srun"), *([f"--restarts={restarts}"] if restarts else []), f"--mpi={mpi}"]


def format_tasks(numbers: Sequence[int], at_a_time: int | None) -> str:
    """Task numbers of an array, and how many may run at once, in the form of `sbatch --array`.

    >>> format_tasks([0, 1, 2, 5, 7, 8], None), format_tasks([3], 2)
    ('0-2,5,7-8', '3%2')
    """
    text = format_ranges(numbers).replace(" ", "")
    return text if at_a_time is None else f"{text}%{at_a_time}"
