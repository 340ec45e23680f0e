"""Submitting a batch script to Slurm, unless another job works in the same folder."""

import getpass
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path

from pflmpi import atomic
from pflmpi.cluster.batch_script import (
    BatchScript,
    Options,
    drop_job_variables,
    format_options,
    format_script,
    parse_time,
    resolve_options,
)
from pflmpi.cluster.job_log import expand_pattern
from pflmpi.cluster.jobs import Job, NoAnswer, find_jobs_in, query_queue, run_command
from pflmpi.config.load import Config
from pflmpi.errors import ConfigError
from pflmpi.store import job_file
from pflmpi.store.job_file import Submission


def find_queued_job(folder: Path, queued: Sequence[Job]) -> Job | None:
    """The first of the jobs that works in a folder, or waits to."""
    return next((job for job in find_jobs_in(folder, queued) if job.in_queue), None)


def refuse_second(out: Path, others: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise if another job works in the folder or waits to, unless this one has a --dependency."""
    refuse_without_slurm()
    depends = any(word.startswith(("--dependency", "-d")) for word in others)
    if not depends and (job := find_queued_job(out, query_queue(environ))):
        if job.never_starts:
            raise ConfigError(f"job {job.id}, submitted for {out} before, {job.never_starts}")
        raise ConfigError(
            f"job {job.id} is {job.state} and works in {out} already; wait for it, end it (scancel {job.id}), choose "
            f"another --out, or let this one wait for it (-- --dependency=afterany:{job.array or job.id})"
        )


def refuse_without_slurm() -> None:
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "there is no sbatch here: submit on a login node of a Slurm cluster, or see the script with --dry-run"
        )


def refuse_transport(config: Config, mpi: str) -> None:
    """Raise for a transport that every rank would refuse when the job starts."""
    if config.runtime.transport == "mpi" and mpi == "none":
        raise ConfigError(
            "runtime.transport = 'mpi', but with --mpi none every rank would be alone; give --mpi pmix (Open MPI) or "
            "--mpi pmi2 (MPICH)"
        )


def submit(
    batch: BatchScript, folder: Path, environ: Mapping[str, str], rounds: int = 0, cells: Mapping[str, int] = {}
) -> str:
    """Submit a batch script, and record the job in the folder of its run or sweep, which exists; return its id.

    Args:
        rounds, cells: as in `Submission`.
    """
    process = _sbatch(batch, environ)
    number = process.stdout.strip().partition(";")[0]
    if not number.isdecimal():
        raise ConfigError(
            f"sbatch printed {process.stdout.strip()[:200]!r} instead of the id of a job, which it may have submitted: "
            "`squeue --me` shows it, `scancel` ends it; leave out the option that changes what sbatch prints"
        )
    print(process.stderr, end="", file=sys.stderr)  # its warnings
    log = _log(batch.options, number, {"%": "%%", **({} if batch.array else {"j": number})})
    partition = partition_name(batch)
    inode = folder.stat().st_ino
    log = os.path.abspath(log)
    submission = Submission(log, batch.requeue, batch.planned_memory, partition, inode, rounds, cells)
    job_file.append(folder, number, record=submission)
    return number


def partition_name(batch: BatchScript) -> str:
    """The partition that a job asks for, or several separated by commas; "" for the default."""
    return resolve_options(batch.options, batch.others).get("partition") or ""


def partition(name: str, environ: Mapping[str, str]) -> tuple[float, int]:
    """Time limit of a partition in seconds (inf without a limit), and the cores of its smallest node.

    Without a limit and with 0 cores if Slurm does not know the partition or does not answer.

    Args:
        name: from `partition_name`; of several partitions, the longest limit counts.
    """
    try:
        lines = run_command(["sinfo", "--noheader", "--format=%P %l %c"], environ).decode().splitlines()
    except (ConfigError, NoAnswer):
        return inf, 0
    limits, cores = [], []
    for partition, limit, node_cores in (line.split() for line in lines if line.count(" ") == 2):
        is_default = partition.endswith("*")
        if partition.rstrip("*") in name.split(",") if name else is_default:
            limits.append(parse_time(limit) or inf)
            cores.append(int(node_cores.rstrip("+")))  # 8+ where nodes differ
    return max(limits, default=inf), min(cores, default=0)


def predict_start(batch: BatchScript, environ: Mapping[str, str]) -> str:
    """When and where a job would start, in Slurm's words, without submitting it."""
    refuse_without_slurm()
    return _sbatch(batch, environ, "--test-only").stderr.strip().removeprefix("sbatch: ")


def _sbatch(batch: BatchScript, environ: Mapping[str, str], *more: str) -> "subprocess.CompletedProcess[str]":
    """Give a batch script to sbatch; raise `ConfigError` if that refuses it."""
    # Its options are repeated, because the user's SBATCH_ variables override those in a script.
    words = ["sbatch", "--parsable", *more, *format_options(batch.options, batch.others)]
    process = subprocess.run(
        words, input=format_script(batch), capture_output=True, text=True, env=drop_job_variables(environ)
    )
    if process.returncode:
        raise ConfigError(f"sbatch refused the job: {' '.join(process.stderr.split())}; change the options")
    return process


def make_folders(*folders: Path) -> None:
    for folder in folders:
        with atomic.explain_write_error(f"the folder {folder}", "choose another one"):
            folder.mkdir(parents=True, exist_ok=True)


def format_log_path(options: Options, number: str) -> str:
    """The log of a job, with `*` for the task number of an array."""
    return _log(options, number, {"j": number, "a": "*"})


def _log(options: Options, number: str, values: Mapping[str, str]) -> str:
    """The file of stderr if it has one of its own, else of stdout; `values` are of letters in its pattern."""
    pattern = options.get("error") or options["output"] or ""  # progress is written to stderr
    name = (options["job-name"] or "").replace("%", values.get("%", "%"))
    return expand_pattern(pattern, {"A": number, "x": name, "u": getpass.getuser(), **values})
