"""Submitting a batch script to Slurm, unless another job works in the same folder."""

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pflmpi.cluster.batch_script import BatchScript, Options, outside_job, script, words_of
from pflmpi.cluster.job_log import file_name
from pflmpi.cluster.jobs import Job, jobs_in, queue
from pflmpi.config.load import Config
from pflmpi.errors import ConfigError
from pflmpi.store import job_file
from pflmpi.store.job_file import Submission


def working_in(folder: Path, queued: Sequence[Job]) -> Job | None:
    """A job that works in a folder, or waits to."""
    return next((job for job in jobs_in(folder, queued) if job.in_queue), None)


def refuse_second(out: Path, others: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise if another job works in the folder or will, unless this job depends on another."""
    refuse_without_slurm()
    waits = any(word.startswith(("--dependency", "-d")) for word in others)
    if not waits and (job := working_in(out, queue(environ))):
        raise ConfigError(
            f"job {job.id} is {job.state} and works in {out} already; wait for it, end it (scancel {job.id}), choose "
            f"another --out, or let this one wait for it (-- --dependency=afterany:{job.array or job.id})"
        )


def refuse_without_slurm() -> None:
    """Raise if this machine cannot submit."""
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "there is no sbatch here: submit on a login node of a Slurm cluster, or see the script with --dry-run"
        )


def refuse_transport(config: Config, mpi: str) -> None:
    """Refuse what every rank would refuse when the job starts."""
    if config.runtime.transport == "mpi" and mpi == "none":
        raise ConfigError(
            "runtime.transport = 'mpi', but with --mpi none every rank would be alone; give --mpi pmix (Open MPI) or "
            "--mpi pmi2 (MPICH)"
        )


def submit(batch: BatchScript, folder: Path, environ: Mapping[str, str], planned_memory: int = 0) -> str:
    """Submit a batch script, and record the job in the folder of its run or sweep, which exists; the job's id.

    Args:
        planned_memory: bytes of a node that `plan` has counted; 0 where nobody asked.
    """
    done = _sbatch(batch, environ)
    number = done.stdout.strip().partition(";")[0]
    if not number.isdecimal():
        why = f"it printed {done.stdout.strip()[:200]!r} instead of the id of a job"
        raise ConfigError(f"sbatch refused the job: {why}; change the options")
    print(done.stderr, end="", file=sys.stderr)  # its warnings
    log = str(Path(batch.options["output"] or "").absolute())
    letters = {"%": "%%", "A": number, "x": batch.options["job-name"] or "", **({} if batch.array else {"j": number})}
    job_file.append(folder, number, record=Submission(file_name(log, letters), batch.requeue, planned_memory))
    return number


def would_start(batch: BatchScript, environ: Mapping[str, str]) -> str:
    """When and where a job would start, in Slurm's words; nothing is submitted."""
    refuse_without_slurm()
    return _sbatch(batch, environ, "--test-only").stderr.strip().removeprefix("sbatch: ")


def _sbatch(batch: BatchScript, environ: Mapping[str, str], *more: str) -> "subprocess.CompletedProcess[str]":
    """Give a batch script to sbatch; raise `ConfigError` if that refuses it."""
    # Its options are repeated, because the user's SBATCH_ variables override those in a script.
    words = ["sbatch", "--parsable", *more, *words_of(batch.options, batch.others)]
    done = subprocess.run(words, input=script(batch), capture_output=True, text=True, env=outside_job(environ))
    if done.returncode:
        raise ConfigError(f"sbatch refused the job: {' '.join(done.stderr.split())}; change the options")
    return done


def make_folders(*folders: Path) -> None:
    """Make the folders that a job needs, which Slurm would not do."""
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the folder {folder}: {error.strerror}; choose another --out") from error


def log_of(options: Options, number: str) -> str:
    """The file with the output of a job; `*` stands for the task of an array."""
    values = {"j": number, "A": number, "a": "*", "x": options["job-name"] or ""}
    return file_name(options["output"] or "", values)
