"""Personalised federated learning on clusters. `import pflmpi` alone imports no torch.

`pflmpi.open_run(FOLDER)` opens a run to read: its configuration, metrics and checkpoints; that needs no torch either.
"""

__version__ = "0.1.0"
__all__ = ["__version__", "open_run"]


def __getattr__(name: str) -> object:
    if name == "open_run":  # without an import statement: what it needs is imported when it is asked for
        return __import__("pflmpi.analysis.run", fromlist=[name]).open_run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
