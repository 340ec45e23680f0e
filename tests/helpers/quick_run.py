"""Running whole experiments in this process; see `pflmpi.testing.quick_run`."""

from pflmpi.testing.quick_run import QUICK, digest, resume, run, settings

__all__ = ["QUICK", "digest", "resume", "run", "settings"]
