"""A real Slurm of four nodes on this machine, brought up for the tests that are marked `slurm`.

`PFLMPI_SLURM_TESTBED` names a folder with two programs: `up --nodes N --cpus N --gpus N --node-timeout S`, and `down`.
"""

import os
import re
import shutil
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

OPTIONS = ("--nodes", "4", "--cpus", "8", "--gpus", "2", "--node-timeout", "10")
_ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")


@contextmanager
def cluster():
    """Bring the test bed up, and down again unless it was up before; skip the test where there is none."""
    folder = os.environ.get("PFLMPI_SLURM_TESTBED")
    if not folder or os.geteuid() != 0:
        pytest.skip("needs the Slurm test bed: be root and set PFLMPI_SLURM_TESTBED to the folder of its up and down")
    before = shutil.which("sinfo") is not None and _call("sinfo", "--noheader", check=False) != ""
    _call(f"{folder}/up", *OPTIONS, timeout=120)
    try:
        yield
    finally:
        if not before:
            _call(f"{folder}/down", timeout=60)


def rebuild():
    """Bring back a node that a test has killed; Slurm then knows no job of before."""
    _call(f"{os.environ['PFLMPI_SLURM_TESTBED']}/up", *OPTIONS, timeout=120)


@contextmanager
def forgetful():
    """Let Slurm forget jobs as soon as they have ended, as it does after some minutes."""
    settings = Path(os.environ.get("SLURM_CONF", "/etc/slurm/slurm.conf"))
    text = settings.read_text()
    settings.write_text(re.sub("(?m)^MinJobAge=.*$", "", text) + "\nMinJobAge=2\n")
    _call("scontrol", "reconfigure")
    try:
        yield
    finally:
        settings.write_text(text)
        _call("scontrol", "reconfigure")


def sbatch(*arguments, env=None):
    """Submit a batch script and return the job's id."""
    return _call("sbatch", "--parsable", *map(str, arguments), env=env).strip().split(";")[0]


def fields(job):
    """What `scontrol show job` says about a job (of an array's task: `ID_N`)."""
    text = _call("scontrol", "show", "--oneliner", "job", job)
    return dict(word.split("=", 1) for word in text.split() if "=" in word)


def state(job):
    """The state of a job, such as RUNNING."""
    return fields(job)["JobState"]


def wait_until(job, *states, timeout=90):
    """Wait until a job is in one of the states (any end if none is given) and return it."""
    end, wanted = time.monotonic() + timeout, states or _ENDED
    while (now := state(job)) not in wanted:
        assert time.monotonic() < end, f"job {job} is {now} after {timeout} s, expected {wanted}: {fields(job)}"
        assert states == () or now not in _ENDED, f"job {job} ended as {now}, expected {wanted}: {fields(job)}"
        time.sleep(0.2)
    return now


def expand(nodes):
    """The names in a list such as `node[1-3]`."""
    return _call("scontrol", "show", "hostnames", nodes).split()


def node_processes(node):
    """The processes that live on a node, its slurmd among them."""
    return [int(pid) for pid in _call("ip", "netns", "pids", f"slurmtb-{node}").split()]


def _call(*command, timeout=30, check=True, env=None):
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)
    assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout
