"""Data: where it comes from (sources), who holds it (partitions), and the clients' splits (federation)."""

from pflmpi.data.loading import load
from pflmpi.data.sources import SOURCES

__all__ = ["SOURCES", "load"]
