"""Running whole experiments in this process; see `pflmpi.testing.quick_run`."""

from pflmpi.cli import main
from pflmpi.testing.quick_run import QUICK, digest, resume, run, settings

__all__ = ["QUICK", "command", "digest", "resume", "run", "settings"]


def command(words):
    """The exit code of a command, also of one that ends the process, as a run does."""
    try:
        return main(words)
    except SystemExit as ended:
        return int(ended.code or 0)
