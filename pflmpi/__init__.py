"""Personalised federated learning on clusters. `import pflmpi` alone imports no torch.

`pflmpi.Config(...)` makes a configuration, `pflmpi.run(CONFIG, out=FOLDER)` runs it, `pflmpi.submit(CONFIG, ntasks=4)`
runs it in a Slurm job; `pflmpi.open_run(FOLDER)` opens a run to read its configuration, metrics and checkpoints,
`pflmpi.open_runs("runs/*")` opens several. Reading needs no torch.
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

if "PFLMPI_EXIT_FILE" in _os.environ:  # a wrapper in launch/ trusts the launcher's 0 only if rank 0 came to its end
    _atexit.register(lambda: __import__("pflmpi.errors", fromlist=["write_end"]).write_end(_os.environ))


def __getattr__(name: str) -> object:
    if name in _HOMES:  # imported when first used
        return getattr(__import__(_HOMES[name], fromlist=[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
