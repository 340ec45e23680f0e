"""The versions of what a run is made of."""

import platform
import sys
from importlib import import_module, metadata

import pflmpi
from pflmpi.text import first_line

_IMPORTED = {"torch": "torch", "numpy": "numpy", "h5py": "pflmpi.store.hdf5"}  # package -> the module that loads it


def versions() -> tuple[dict[str, str], dict[str, str]]:
    """Return the version of each package ("" if it is not there), and why those that are broken are.

    mpi4py is not imported here, because it would start MPI.
    """
    found = {"python": platform.python_version(), "pflmpi": pflmpi.__version__}
    broken = {}
    for package, module in _IMPORTED.items():
        try:
            import_module(module)
        except (ImportError, OSError) as error:
            broken[package] = first_line(error)
    for package in (*_IMPORTED, "mpi4py"):
        found[package] = _version(package)
    return found, broken


def _version(package: str) -> str:
    """Return the version that is loaded, or else the one that is installed."""
    module = sys.modules.get(package)
    if module is not None:
        return str(getattr(module, "__version__", "unknown"))
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
