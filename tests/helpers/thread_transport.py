"""Ranks as threads of one process; see `pflmpi.testing.thread_ranks`."""

from pflmpi.testing.thread_ranks import ThreadTransport, run_ranks

__all__ = ["ThreadTransport", "run_ranks"]
