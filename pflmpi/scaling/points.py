"""The runs of a scaling experiment: every number of ranks once, then again."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pflmpi.scaling.experiment import Scaling
from pflmpi.sweep.planned_run import PlannedRun
from pflmpi.text import counted


@dataclass(frozen=True)
class ScaleRun(PlannedRun):
    """A run on so many ranks; `repeat` counts from 1."""

    ranks: int
    repeat: int
    raw: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{counted(self.ranks, 'rank')}, repeat {self.repeat}"

    def run(self, out: Path) -> Path:
        return folder(out, self.ranks) / f"repeat{self.repeat}"

    def record(self, out: Path) -> Path:
        """File with what is known of the run beside its metrics."""
        return self._beside(out, "json")


def folder(out: Path, ranks: int) -> Path:
    """Folder of all runs on so many ranks."""
    return out / f"ranks-{ranks:04d}"


def runs(scaling: Scaling) -> list[ScaleRun]:
    """All runs, in the order in which they are made: repeats take turns, so that a slow minute strikes all points."""
    raw = {ranks: scaling.raw(ranks) for ranks in scaling.ranks}
    return [ScaleRun(ranks, repeat, raw[ranks]) for repeat in range(1, scaling.repeats + 1) for ranks in scaling.ranks]
