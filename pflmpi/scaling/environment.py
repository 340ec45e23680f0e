"""The environment of a measurement: hardware, driver, versions, commit."""

import platform
import re
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pflmpi
from pflmpi import machine
from pflmpi.text import counted

_DRIVER = Path("/proc/driver/nvidia/version")
_PACKAGES = ("torch", "numpy", "mpi4py", "h5py")


def environment(environ: Mapping[str, str], on_gpu: bool) -> dict[str, str]:
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
        "driver": _driver() if on_gpu else "",
        "python": platform.python_version(),
        "pflmpi": pflmpi.__version__,
        **{name: _version(name) for name in _PACKAGES},
        "commit": commit(Path(pflmpi.__file__).parent),
        "job": environ.get("SLURM_JOB_ID", ""),
    }


def commit(package: Path) -> str:
    """The commit that a package is checked out from, with a + where files have changed; "" outside of a repository."""
    tracked = _git(package, "ls-files", "--error-unmatch", "__init__.py")
    if not tracked:
        return ""
    changed = _git(package, "status", "--porcelain", "--untracked-files=no", ".")
    return f"{_git(package, 'rev-parse', '--short=12', 'HEAD')}{'+' if changed else ''}"


def hardware(found: Mapping[str, str]) -> str:
    """The hardware in one line."""
    parts = [found.get("cpu", ""), counted(int(found.get("cores") or 0), "core"), found.get("gpus", "")]
    return ", ".join(part for part in parts if part)


def _git(folder: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _driver() -> str:
    try:
        found = re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", _DRIVER.read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
