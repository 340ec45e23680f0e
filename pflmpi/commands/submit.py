"""`pflmpi submit`: a run, or a sweep as a job array, as a batch job of Slurm."""

import argparse
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from pflmpi.cluster import sbatch
from pflmpi.cluster.queue import GOING_ON, WAITING, cells_file, comment_of, mine
from pflmpi.cluster.script import Job, script, tasks
from pflmpi.commands import launch as launching
from pflmpi.commands.pending import Pending, one_run, sweep
from pflmpi.errors import ConfigError, PflmpiError

_WARNING = "USR1@120"  # to the ranks, seconds before the time limit: for a round and a checkpoint
_OURS = ("--out", "--array", "--jobs", "--mpi", "--requeue", "--dry-run", "--set", "--seeds", "--only", "--debug")


def main(options: argparse.Namespace, given: Sequence[str]) -> int:
    """Submit what is not done yet; return the exit code."""
    logging.basicConfig(level=logging.DEBUG if options.debug else logging.WARNING, format="pflmpi: %(message)s")
    try:
        _submit(*_read(given))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except PflmpiError as error:
        if options.debug:
            traceback.print_exception(error)
        launching.report(error)
        return error.exit_code
    return 0


def _read(given: Sequence[str]) -> tuple[argparse.Namespace, sbatch.Options]:
    """Return our options and sbatch's.

    The command line is read anew without sbatch's: a parser that does not know them takes the value of one of them,
    as in `--time 1:00:00`, for the configuration.
    """
    from pflmpi.cli import parser

    ours, found = sbatch.split(given)
    options, left = parser().parse_known_args(ours)
    sbatch.refuse_unknown(left, _OURS)
    return options, found


def _submit(options: argparse.Namespace, given: sbatch.Options) -> None:
    _check(options, given)
    pending = one_run(options) if options.array is None else sweep(options)
    if pending is None:
        return
    job = _job(options, given, pending)
    text = script(job)
    log = Path(job.options["output"] or "")
    if options.dry_run:
        print(text, end="")
        if not log.parent.is_dir():
            print(f"pflmpi: make {log.parent}/ before you submit this; Slurm would not", file=sys.stderr)
        return
    _refuse_a_second(pending.out, given)
    for folder in [log.parent, pending.out] if pending.cells else [log.parent]:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the folder {folder}: {error.strerror}; choose another --out") from error
    number = _sbatch(text, sbatch.words_of(job.options))
    what = f", {len(pending.todo)} of {len(pending.cells)} cells" if pending.cells else ""
    means = {"%%": "%", "%j": number, "%A": number, "%a": "*"}
    shown = re.sub("%[%jAa]", lambda found: means[found[0]], str(log))
    print(f"job {number}: {pending.out}{what}")
    print(f"log: {shown}")
    print(f"watch: pflmpi status {number}    or: tail -F {'*'.join(map(shlex.quote, shown.split('*')))}")
    if pending.cells:
        cells_file(pending.out, number).write_text("".join(f"{cell}\n" for cell in pending.cells))


def _check(options: argparse.Namespace, given: sbatch.Options) -> None:
    if (options.config is None) == (options.array is None):
        raise ConfigError("submit takes a CONFIG, for one run, or --array TABLE, for a sweep; give one of them")
    if options.array is None:
        for name, value in (("jobs", options.jobs), ("seeds", options.seeds), ("only", options.only or None)):
            if value is not None:
                raise ConfigError(f"--{name} is for --array TABLE, which is not given; leave it out")
    if options.jobs is not None and options.jobs < 1:
        raise ConfigError(f"--jobs {options.jobs}: must be at least 1")
    if options.requeue and "no-requeue" in given:
        raise ConfigError("--requeue and --no-requeue are both given; give one of them")
    if "B" in (given.get("signal") or "").rpartition(":")[0]:
        raise ConfigError(
            f"--signal={given['signal']} warns the batch script, and the ranks have to know; write "
            f"--signal={(given['signal'] or '').rpartition(':')[2]}"
        )


def _job(options: argparse.Namespace, given: sbatch.Options, pending: Pending) -> Job:
    source = options.config or options.array
    number = "%j" if options.array is None else "%A_%a"
    ours: dict[str, str | None] = {
        "job-name": source.stem,
        "chdir": os.getcwd(),
        "comment": comment_of(pending.out),
        "output": f"{pending.out}".replace("%", "%%") + f".{number}.log",
        "open-mode": "append",
    }
    if pending.todo:
        ours["array"] = tasks(pending.todo, options.jobs)
    if options.requeue:
        ours |= {"requeue": None, "signal": _WARNING}
    return Job(
        options={**ours, **given},
        python=sys.executable,
        arguments=pending.arguments,
        mpi=options.mpi,
        array=options.array is not None,
        requeue=options.requeue,
    )


def _refuse_a_second(out: Path, given: sbatch.Options) -> None:
    """Refuse a job for a folder in which another one works, or will, unless it is to wait for that one."""
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "there is no sbatch here: submit on a login node of a Slurm cluster, or see the script with --dry-run"
        )
    for job in [] if "dependency" in given else mine(os.environ, out):
        if job.state in (*WAITING, *GOING_ON):
            raise ConfigError(
                f"job {job.id} is {job.state} and works in {out} already; let it, end it (scancel {job.id}), choose "
                f"another --out, or let this one wait for it (--dependency=afterany:{job.array or job.id})"
            )


def _sbatch(text: str, words: Sequence[str]) -> str:
    """Submit a script and return the job's id.

    Args:
        words: the options in the script once more, because SBATCH_ variables of the user come before a script's.
    """
    done = subprocess.run(["sbatch", "--parsable", *words], input=text, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"sbatch has refused the job: {' '.join(done.stderr.split())}; change the options")
    print(done.stderr, end="", file=sys.stderr)  # its warnings
    return done.stdout.strip().partition(";")[0]
