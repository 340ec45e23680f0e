"""A JSON record of each run of a scaling experiment: hardware, versions, digest, or why the run failed."""

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
    """Describes this machine and its software; "" for what is unknown or not used.

    Args:
        on_gpu: whether the run computes on GPUs; they are queried only then, because that loads the driver.
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
    """The commit of a package in a git repository, with a + if files have changed; "" outside of a repository."""
    tracked = _run_git(package, "ls-files", "--error-unmatch", "__init__.py")
    if not tracked:
        return ""
    changed = _run_git(package, "status", "--porcelain", "--untracked-files=no", ".")
    return f"{_run_git(package, 'rev-parse', '--short=12', 'HEAD')}{'+' if changed else ''}"


def made_by(words: Sequence[str]) -> str:
    """A sentence for the footer of a page: with which version and command, when and where it was made."""
    here = collect_environment({}, on_gpu=False)
    version = f"{here['pflmpi']} (commit {here['commit']})" if here["commit"] else here["pflmpi"]
    place = f"{here['host']}, {hardware(here)}, Python {here['python']}"
    command = printable(shlex.join(["pflmpi", *words]))
    return f"Made by pflmpi {version} at {time.strftime('%Y-%m-%d %H:%M %Z')} on {place}, by {command}."


def hardware(record: Mapping[str, str]) -> str:
    """Processor, cores and GPUs as text."""
    parts = [record.get("cpu", ""), pluralize(int(record.get("cores") or 0), "core"), record.get("gpus", "")]
    return ", ".join(part for part in parts if part)


def _run_git(folder: Path, *words: str) -> str:
    """The output of a git command; "" if it fails."""
    try:
        result = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


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
    """Writes the record of a run that has finished on so many nodes; returns why it could not, or ""."""
    run = planned.run(out)
    try:
        last, _ = verify.find_newest_good(run)
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
    """Records why a run failed; it is run again the next time."""
    write(planned.record(out), {"ranks": planned.ranks, "repeat": planned.repeat, "problem": problem})


def write(path: Path, values: Record) -> None:
    with atomic.explain_write_error(path, "choose another --out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, json.dumps(values, indent=1).encode())


def read(path: Path) -> Record:
    """Reads a record; {} if there is none or it is damaged, so that the run is made again."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def is_measured(planned: ScaleRun, out: Path) -> bool:
    """Whether a run has finished, its record is written, and it was not deleted since."""
    return "digest" in read(planned.record(out)) and planned.run(out).exists()
