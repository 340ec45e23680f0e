"""Data: its sources, its partition among clients, and each client's training and test samples."""

from pflmpi.data.loading import load
from pflmpi.data.sources import SOURCES

__all__ = ["SOURCES", "load"]
