"""A run that is started by another command, with its configuration and its log beside its folder."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any


class PlannedRun(ABC):
    """A run of a sweep or of a scaling experiment.

    Attributes:
        raw: its configuration, not yet validated.
    """

    raw: dict[str, Any]

    @property
    @abstractmethod
    def name(self) -> str:
        """For display; no other run of the command has it."""

    @abstractmethod
    def run(self, out: Path) -> Path:
        """Folder of the run, in the folder of all."""

    def config(self, out: Path) -> Path:
        """File with the configuration, beside the run."""
        return self._beside(out, "yaml")

    def log(self, out: Path) -> Path:
        """File with the output of the run."""
        return self._beside(out, "log")

    def _beside(self, out: Path, kind: str) -> Path:
        run = self.run(out)
        return run.with_name(f"{run.name}.{kind}")
