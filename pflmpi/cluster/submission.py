"""Submitting a batch script to Slurm, unless another job works in the same folder."""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from pflmpi.cluster.queue import mine
from pflmpi.cluster.sbatch import Options, words_of
from pflmpi.config.load import Config
from pflmpi.errors import ConfigError


def refuse_second(out: Path, options: Options, environ: Mapping[str, str]) -> None:
    """Raise if another job works in the folder or will, unless this job depends on another."""
    refuse_without_slurm()
    for job in [] if "dependency" in options else mine(environ, out):
        if job.active or job.waiting:
            raise ConfigError(
                f"job {job.id} is {job.state} and works in {out} already; wait for it, end it (scancel {job.id}), "
                f"choose another --out, or let this one wait for it (--dependency=afterany:{job.array or job.id})"
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


def submit(script: str, options: Options) -> str:
    """Submit a script; gives the job's id.

    Args:
        options: those in the script, repeated because the user's SBATCH_ variables override a script's options.
    """
    words = ["sbatch", "--parsable", *words_of(options)]
    done = subprocess.run(words, input=script, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"sbatch refused the job: {' '.join(done.stderr.split())}; change the options")
    print(done.stderr, end="", file=sys.stderr)  # its warnings
    return done.stdout.strip().partition(";")[0]
