"""Slurm's variables of a job step: its tasks, its hosts, a rendezvous address for torch, and the end of the job."""

import logging
import re
import subprocess
import time
from collections.abc import Mapping

from pflmpi.errors import ConfigError

_log = logging.getLogger(__name__)

_SQUEUE_TIMEOUT = 10.0  # seconds for squeue
_NOT_STARTED_BY_SRUN = 0xFFFFFF00  # step ids from here on: the batch script, salloc's shell and the like


def is_in_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process; batch scripts have most of its variables, too."""
    step = environ.get("SLURM_STEP_ID", "")
    return "SLURM_PROCID" in environ and step.isdecimal() and int(step) < _NOT_STARTED_BY_SRUN


def find_tasks_variable(environ: Mapping[str, str]) -> str:
    """Returns the name of the variable with the step's number of tasks, or the job's if the step's is missing."""
    return "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"


def read_num_tasks(environ: Mapping[str, str]) -> str | None:
    """The step's number of tasks as text; None if it is not set."""
    return environ.get(find_tasks_variable(environ))


def parse_first_host(nodelist: str) -> str:
    """Returns the first host of a node list.

    >>> parse_first_host("node[003-010,17],login"), parse_first_host("rack[1-2]n[05,7]-ib"), parse_first_host("a1")
    ('node003', 'rack1n05-ib', 'a1')
    """
    first = re.split(r",(?![^\[]*\])", nodelist.strip())[0]  # commas outside of brackets
    host = re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)
    if not re.fullmatch(r"[\w.-]+", host):
        raise ConfigError(f"the node list {nodelist!r} cannot be read; set MASTER_ADDR, or start with torchrun")
    return host


def find_rendezvous_address(environ: Mapping[str, str]) -> str:
    """Returns host:port on the first host, with a port that depends on the step; "" without a node list."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    job = environ.get("SLURM_JOB_ID", "")
    if not nodes or not job.isdecimal():
        return ""
    host = environ.get("MASTER_ADDR") or parse_first_host(nodes)
    step = environ.get("SLURM_STEP_ID", "")
    # Jobs and steps may share a node: ports of jobs whose ids are near differ for their first 13 steps too.
    number = int(job) + (6181 * int(step) if step.isdecimal() else 0)
    port = environ.get("MASTER_PORT") or str(20000 + number % 10000)
    return f"{host}:{port}"


def read_allocation(environ: Mapping[str, str]) -> tuple[int, int, int]:
    """Returns the nodes, cores and GPUs of this job; 0 where Slurm does not say.

    >>> read_allocation({"SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_CPUS_PER_NODE": "72(x2),36", "SLURM_GPUS_ON_NODE": "4"})
    (3, 180, 12)
    """
    nodes, gpus = (int(environ.get(name) or 0) for name in ("SLURM_JOB_NUM_NODES", "SLURM_GPUS_ON_NODE"))
    cores = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    return nodes, sum(int(number) * int(times or 1) for number, times in cores), nodes * gpus


def find_end_of_job(environ: Mapping[str, str]) -> float | None:
    """End of this batch job in seconds since the epoch; None outside a job, without a limit, or if unknown.

    The variables of a job that has ended, which a remaining shell may have, are ignored with a warning.
    """
    end = _end_of_job(environ)
    if end is None or end > time.time():
        return end
    job, when = environ.get("SLURM_JOB_ID", "?"), time.strftime("%Y-%m-%d %H:%M", time.localtime(end))
    _log.warning("job %s ended at %s: its limit is ignored; unset SLURM_JOB_ID and SLURM_JOB_END_TIME", job, when)
    return None


def without_formats(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment without the variables that set filters and formats of Slurm's commands."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(("SQUEUE_", "SACCT_")) and name != "SLURM_TIME_FORMAT"
    }


def _end_of_job(environ: Mapping[str, str]) -> float | None:
    if environ.get("SLURM_JOB_END_TIME", "").isdecimal():  # since Slurm 22.05 or 23.02, if the job has a limit
        return float(environ["SLURM_JOB_END_TIME"])
    job = environ.get("SLURM_JOB_ID", "")
    if not job.isdecimal():
        return None
    command = ["squeue", "--noheader", f"--jobs={job}", "--format=%e"]
    try:
        squeue = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_SQUEUE_TIMEOUT,
            check=True,
            env=without_formats(environ),
        )
        return time.mktime(time.strptime(squeue.stdout.split()[0], "%Y-%m-%dT%H:%M:%S"))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):  # no squeue here, or no limit ("NONE")
        return None
