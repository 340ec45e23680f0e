"""Records beside the runs of a scaling experiment: hardware, versions, digest, or why a run failed."""

import json
import platform
import re
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pflmpi
from pflmpi import atomic, machine
from pflmpi.config import stored
from pflmpi.errors import UserError
from pflmpi.scaling.experiment import ScaleRun
from pflmpi.store import verify
from pflmpi.store.run_folder import digest
from pflmpi.text import pluralize, printable

_DRIVER = Path("/proc/driver/nvidia/version")
_PACKAGES = ("torch", "numpy", "mpi4py", "h5py")


def collect_environment(environ: Mapping[str, str], on_gpu: bool) -> dict[str, str]:
    """This machine and the software on it; "" for what is not known or not used.

    Args:
        on_gpu: whether the run computes on GPUs; asking for them starts the driver.
    """
    gpus = machine.gpus(environ.get("CUDA_VISIBLE_DEVICES")) if on_gpu else ()
    models = [gpu.model for gpu in gpus]
    return {
        "host": platform.node(),
        "cpu": machine.processor(),
        "cores": str(len(machine.cores())),
        "gpus": ", ".join(f"{models.count(model)} {model}" for model in dict.fromkeys(models)),
        "driver": _find_driver_version() if on_gpu else "",
        "python": platform.python_version(),
        "pflmpi": pflmpi.__version__,
        **{name: _find_package_version(name) for name in _PACKAGES},
        "commit": find_commit(Path(pflmpi.__file__).parent),
        "job": environ.get("SLURM_JOB_ID", ""),
    }


def find_commit(package: Path) -> str:
    """The commit that a package is checked out from, with a + where files have changed; "" outside of a repository."""
    tracked = _run_git(package, "ls-files", "--error-unmatch", "__init__.py")
    if not tracked:
        return ""
    changed = _run_git(package, "status", "--porcelain", "--untracked-files=no", ".")
    return f"{_run_git(package, 'rev-parse', '--short=12', 'HEAD')}{'+' if changed else ''}"


def made_by(words: Sequence[str]) -> str:
    """With which version and command, when and where a page is made, in one line."""
    here = collect_environment({}, on_gpu=False)
    version = f"{here['pflmpi']} (commit {here['commit']})" if here["commit"] else here["pflmpi"]
    place = f"{here['host']}, {hardware(here)}, Python {here['python']}"
    command = printable(shlex.join(["pflmpi", *words]))
    return f"Made by pflmpi {version} at {time.strftime('%Y-%m-%d %H:%M %Z')} on {place}, by {command}."


def hardware(record: Mapping[str, str]) -> str:
    parts = [record.get("cpu", ""), pluralize(int(record.get("cores") or 0), "core"), record.get("gpus", "")]
    return ", ".join(part for part in parts if part)


def _run_git(folder: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _find_driver_version() -> str:
    try:
        version = re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", _DRIVER.read_text())
    except OSError:
        return ""
    return version[1] if version else ""


def _find_package_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


Record = dict[str, Any]


def record(planned: ScaleRun, out: Path, nodes: int, environ: Mapping[str, str]) -> str:
    """Write the record of a run that has reached its end on so many nodes; what is wrong with it, or ""."""
    run = planned.run(out)
    try:
        last, _ = verify.newest_good(run)
        recorded = stored.read(run)["recorded"]
        values: Record = {
            "ranks": planned.ranks,
            "repeat": planned.repeat,
            "digest": digest(run, last),
            "nodes": nodes,
            **{name: recorded[name] for name in ("device", "transport", "data")},
            **collect_environment(environ, on_gpu=recorded["device"] != platform.machine()),
        }
    except UserError as error:
        return str(error)
    write(planned.record(out), values)
    return ""


def record_failure(planned: ScaleRun, out: Path, problem: str) -> None:
    """Record why a run has failed; it is made again the next time."""
    write(planned.record(out), {"ranks": planned.ranks, "repeat": planned.repeat, "problem": problem})


def write(path: Path, values: Record) -> None:
    with atomic.refusing(path, "choose another --out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, json.dumps(values, indent=1).encode())


def read(path: Path) -> Record:
    """A record; {} where there is none, or it is damaged: the run is then made again."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def is_measured(planned: ScaleRun, out: Path) -> bool:
    return "digest" in read(planned.record(out))
