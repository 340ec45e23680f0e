"""Personalised federated learning on clusters. `import pflmpi` alone imports no torch.

`pflmpi.run(CONFIG, out=FOLDER)` runs a configuration, `pflmpi.submit(CONFIG, ntasks=4)` does so in a Slurm job,
`pflmpi.Config(...)` makes one; `pflmpi.open_run(FOLDER)` opens a run to read: its configuration, metrics, checkpoints;
`pflmpi.open_runs("runs/*")` several. Reading needs no torch.
"""

import atexit as _atexit
import os as _os

__version__ = "0.1.0"
__all__ = ["Config", "__version__", "open_run", "open_runs", "run", "submit"]

_HOMES = {
    "Config": "pflmpi.config.keywords",
    "open_run": "pflmpi.analysis.run",
    "open_runs": "pflmpi.analysis.runs",
    "run": "pflmpi.python.run",
    "submit": "pflmpi.python.submit",
}

if "PFLMPI_EXIT_FILE" in _os.environ:  # of a wrapper in launch/, which believes a 0 once rank 0 has come to its end
    _atexit.register(lambda: __import__("pflmpi.errors", fromlist=["write_end"]).write_end(_os.environ))


def __getattr__(name: str) -> object:
    if name in _HOMES:  # without an import statement: what it needs is imported when it is asked for
        return getattr(__import__(_HOMES[name], fromlist=[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
