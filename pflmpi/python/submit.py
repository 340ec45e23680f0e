"""`pflmpi.submit`: jobs on Slurm, or in processes of this machine, from a notebook or a script."""

import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from io import StringIO
from os import PathLike
from pathlib import Path
from typing import Literal

from pflmpi.analysis.run import Run, open_run
from pflmpi.cli import parser
from pflmpi.cluster import jobs as slurm
from pflmpi.cluster.batch_script import KNOWN
from pflmpi.cluster.job_log import find_last_error
from pflmpi.cluster.submission import make_folders
from pflmpi.cluster.waiting import is_done
from pflmpi.commands.submit import Pending, list_tasks, pending_work, run_trial, write_copy
from pflmpi.commands.submit import submit as submit_to_slurm
from pflmpi.config import yaml_file
from pflmpi.config.argument_checks import as_path
from pflmpi.config.load import Config, parse
from pflmpi.errors import ConfigError, RunError
from pflmpi.registry import format_unknown_name

_MORE = ("anew", "changed_code", "failed", "jobs", "mpi", "only", "pack", "requeue", "restarts", "seeds", "setup")
_OPTIONS = {*_MORE, "site", "srun", "trial", *(name.replace("-", "_") for name in KNOWN)}


class Job:
    """A job of Slurm.

    Attributes:
        id: such as 12, or 12_3 for a task of an array; "" for a run that was complete already.
        folder: of its run.
        log: file with its standard output and standard error.
    """

    def __init__(self, id: str, folder: Path, log: Path, rounds: int = 0) -> None:
        self.id, self.folder, self.log, self._rounds = id, folder, log, rounds

    def __repr__(self) -> str:
        return f"<job {self.id or 'of before'}: {self.state}, {self.folder}>"

    @property
    def state(self) -> str:
        """Slurm's word, such as PENDING, RUNNING, COMPLETED, FAILED; UNKNOWN where Slurm has forgotten the job."""
        return self._query().state

    def _query(self) -> slurm.Job:
        jobs = slurm.find(self.id, os.environ) if self.id else []
        return jobs[0] if jobs else slurm.Job(self.id, self.id, "UNKNOWN" if self.id else "COMPLETED")

    def done(self) -> bool:
        """Whether it has ended, well or not, or will never start."""
        return not self._query().may_run

    def wait(self) -> None:
        """Wait until it is done."""
        if self.id:
            slurm.wait(self.id, os.environ)

    def result(self) -> Run:
        """Wait for the run, and open it; `RunError` says why the job ended before the run did, by its log."""
        self.wait()
        if is_done(self.folder, self._rounds):
            return open_run(self.folder)
        job = self._query()
        if job.never_starts:
            raise RunError(f"job {self.id} {job.never_starts}")
        why = find_last_error(self.log)
        raise RunError(
            f"job {self.id} ended as {job.state} before its run was complete{': ' * bool(why)}{why}; its log is "
            f"{self.log}; what is complete is kept: submit the same again, and it continues"
        )

    def cancel(self) -> None:
        """End it; what is complete is kept, and continues when the same is submitted again."""
        slurm.cancel([self.id], os.environ)

    def stdout(self) -> str:
        """The text of its log so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    stderr = stdout


class LocalJob(Job):
    """A process of this machine in place of a Slurm job."""

    def __init__(
        self, id: str, folder: Path, log: Path, rounds: int, command: Sequence[str], pool: ThreadPoolExecutor
    ) -> None:
        super().__init__(id, folder, log, rounds)
        self._process: subprocess.Popen[bytes] | None = None
        self._cancelled = False
        self._exit_code = pool.submit(self._run, command)

    def _run(self, command: Sequence[str]) -> int:
        with open(self.log, "ab") as log:  # in a session of its own: an interrupt reaches this process alone
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        if self._cancelled:  # while it was being started
            self._process.terminate()
        return self._process.wait()

    def _query(self) -> slurm.Job:
        state = "RUNNING" if self._process else "PENDING"
        if self._exit_code.done():
            state = "CANCELLED" if self._cancelled else "FAILED" if self._exit_code.result() else "COMPLETED"
        return slurm.Job(self.id, self.id, state)

    def wait(self) -> None:
        if not self._exit_code.cancelled():
            self._exit_code.result()

    def cancel(self) -> None:
        self._cancelled = self._cancelled or not self.done()
        if not self._exit_code.cancel() and self._process:
            self._process.terminate()


def submit(
    config: "Config | str | PathLike[str]",
    *,
    out: "str | PathLike[str] | None" = None,
    cluster: Literal["slurm", "local"] = "slurm",
    sbatch: Sequence[str] = (),
    **options: object,
) -> Job | list[Job]:
    """Submit a run as a job, or the cells of a table that are not done as a job array; a job, or a list of jobs.

    Args:
        config: a `pflmpi.Config`, or the path of a YAML file: a configuration, or a table with rows and columns.
        out: folder of the run (default: runs/NAME, of a `Config` runs/NAME-TIME) or of the sweep (sweeps/NAME).
        cluster: "local" starts processes of this machine in place of Slurm's jobs: `ntasks` ranks each, those of a
            table one after another, or `jobs` at a time. This process ends only after them.
        sbatch: words for sbatch, as they are, such as `["--exclusive"]`.
        options: of `pflmpi submit`, such as nodes=2, ntasks=8, time="auto", trial=True, mem="auto", requeue=True.

    Raises:
        ConfigError: what cannot be submitted; nothing was.
        RunError: the trial that was asked for has ended before a round was complete.
    """
    if cluster not in ("slurm", "local"):
        raise ConfigError(f"cluster = {cluster!r}: must be 'slurm' or 'local'")
    path, folder = _locate_config(config, None if out is None else as_path("out", out))
    table = not isinstance(config, Config) and not yaml_file.read(path).keys().isdisjoint(("rows", "runs_of"))
    words = [*(["--array"] if table else []), str(path), *([] if folder is None else ["--out", str(folder)])]
    chosen = _parse_options(words, options)
    chosen.sbatch = list(sbatch)
    chosen.parsed = parse(config.resolved()) if isinstance(config, Config) else None  # not the subclass of keywords
    pending = pending_work(chosen)
    if pending is not None and cluster == "slurm":
        pending = run_trial(chosen, pending)
    if pending is None:
        return [] if table else Job("", folder or Path("runs", path.stem), Path(os.devnull))
    if cluster == "local":
        return _start_local(pending, chosen.ntasks, chosen.jobs or 1)
    number, log = submit_to_slurm(chosen, pending)
    if not table:
        return Job(number, pending.out, Path(log), pending.runs[pending.out].training.rounds)
    return [
        Job(f"{number}_{task}", run, Path(log.replace("*", str(task))), config.training.rounds)
        for task, (run, config) in zip(list_tasks(pending, chosen.pack), pending.runs.items(), strict=True)
    ]


def _parse_options(words: list[str], options: Mapping[str, object]) -> Namespace:
    """Parses options as the command line of `pflmpi submit` does."""
    for name, value in options.items():
        if name not in _OPTIONS:
            raise ConfigError(format_unknown_name("option", name, sorted(_OPTIONS)))
        for item in value if isinstance(value, list | tuple) else [value]:
            if item is not None and item is not False:
                words.append(f"--{name.replace('_', '-')}{'' if item is True else f'={item}'}")
    errors = StringIO()
    try:
        with redirect_stderr(errors):
            return parser("submit").parse_args(["submit", *words])
    except SystemExit:
        raise ConfigError(errors.getvalue().strip().rpartition("error: ")[2]) from None


def _start_local(pending: Pending, ranks: str | None, at_a_time: int) -> Job | list[Job]:
    make_folders(pending.out)
    write_copy(pending)
    id, pool = f"local-{time.time_ns()}", ThreadPoolExecutor(at_a_time, "pflmpi-job")
    number = [] if ranks in (None, "auto") else ["--ranks", str(ranks)]
    command = [sys.executable, "-P", "-m", "pflmpi", *pending.words, *number]

    def start(id: str, run: Path, *cell: str) -> Job:
        rounds = pending.runs[run].training.rounds
        return LocalJob(id, run, Path(f"{pending.out}.{id}.log"), rounds, [*command, *cell], pool)

    if not pending.tasks:
        return start(id, pending.out)
    return [start(f"{id}_{task}", run, f"--cell={task}") for task, run in zip(pending.tasks, pending.runs, strict=True)]


def _locate_config(config: "Config | str | PathLike[str]", out: Path | None) -> tuple[Path, Path | None]:
    """Returns the configuration file and the run folder; of a `Config` the file that the job is named after, alone."""
    if not isinstance(config, Config):
        return as_path("config", config, "a pflmpi.Config, or the path of a YAML file"), out
    out = out or Path("runs", f"{config.resolved()['algorithm']['name']}-{time.strftime('%Y%m%d-%H%M%S')}")
    return Path(f"{out}.yaml"), out
