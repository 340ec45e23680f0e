"""Starting the product as a user does, watching it, and killing it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PATIENCE = 240.0  # seconds: of a loaded machine, where a rank may need half a minute to import torch
ENVIRONMENT = {
    **os.environ,
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "tcp,sm,self",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "error",
}
BIN = Path(sys.executable).parent
PFLMPI = [sys.executable, "-m", "pflmpi"]


def start_way(way, ranks):
    """The command that starts `pflmpi` on that many ranks; alone, its own option `--ranks` says how many."""
    if way == "alone":
        return PFLMPI
    if way == "mpi":
        return [str(BIN / "mpirun"), "-n", str(ranks), *PFLMPI]
    return [str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={ranks}", "-m", "pflmpi"]


def call(command, timeout=PATIENCE, **options):
    """Run a command to its end; whatever is left of it after the time limit is killed."""
    process = launch(command, **options)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill_all(process.pid)
        out, err = process.communicate()
        raise AssertionError(f"{command} did not end in {timeout} s\n{out}\n{err}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def launch(command, **options):
    """Start a command with its output in pipes."""
    settings = {"env": ENVIRONMENT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, text=True, stdin=subprocess.DEVNULL, **settings)


def errors_until(process, words=None):
    """What a process writes to its standard error, up to a line with these words or to its end."""
    text = ""
    for line in iter(process.stderr.readline, ""):
        text += line
        if words is not None and words in line:
            return text
    process.wait()
    return text


def descendants(pid):
    """All processes below one, children before grandchildren."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            stat = (entry / "stat").read_text()
            parents.setdefault(int(stat.rsplit(")", 1)[1].split()[1]), []).append(int(entry.name))
    pids, queue = [], [pid]
    while queue:
        children = parents.get(queue.pop(0), [])
        pids += children
        queue += children
    return pids


def ranks_of(pid):
    """The processes below one that are ranks: they run `pflmpi` and have no child that does."""
    candidates = [process for process in descendants(pid) if "pflmpi" in _command(process)]
    return [process for process in candidates if not any(child in candidates for child in descendants(process))]


def kill_all(pid):
    """SIGKILL a process and everything below it, at once."""
    for process in [pid, *descendants(pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def wait_for(condition, what, timeout=PATIENCE, every=0.02):
    """Wait until a condition holds; ask every so many seconds."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"waited {timeout} s for {what}"
        time.sleep(every)


def _command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
