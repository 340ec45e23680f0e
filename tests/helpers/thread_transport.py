"""Ranks as threads of one process; see `pflmpi.testing.quick_run`."""

from pflmpi.testing.quick_run import ThreadTransport, run_ranks

__all__ = ["ThreadTransport", "run_ranks"]
