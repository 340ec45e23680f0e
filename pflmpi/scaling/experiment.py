"""A scaling experiment, stored in DIR/scale.yaml, and its runs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from pflmpi import atomic
from pflmpi.config import yaml_file
from pflmpi.config.sections import by_key, find_differences
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.sweep.table import PlannedRun
from pflmpi.text import join_truncated, pluralize

Mode = Literal["strong", "weak", "packing"]
FILE = "scale.yaml"
WARM_UP = 1  # first rounds of each run that are not measured, as they load and compile


@dataclass(frozen=True)
class Scaling:
    """A scaling experiment."""

    mode: Mode  # strong: the same work; weak: clients in proportion to the ranks; packing: the same cores or GPUs
    ranks: tuple[int, ...]  # number of ranks of each point, ascending
    repeats: int  # number of runs of each point
    rounds: int  # number of rounds of each run
    base: int  # in weak mode, the number of ranks for which the configuration has the clients
    cores: int  # in packing mode on CPUs, the cores that all ranks share; 0 otherwise
    config: dict[str, Any]  # the resolved configuration

    def threads(self, ranks: int) -> int:
        """Threads of each rank of a point."""
        if not self.cores:
            return int(self.config["runtime"]["threads"])
        return max(self.cores // ranks, 1)

    def clients(self, ranks: int) -> int | None:
        """Number of clients of a point; None if the configuration does not set it."""
        clients: int | None = self.config["partition"].get("clients")
        if clients is None or self.mode != "weak":
            return clients
        return clients * ranks // self.base

    def raw(self, ranks: int) -> dict[str, Any]:
        """The configuration of the runs of a point."""
        values = {name: dict(value) if isinstance(value, dict) else value for name, value in self.config.items()}
        values["training"] |= {"rounds": self.rounds, "stop": None}
        values["runtime"]["threads"] = self.threads(ranks)
        if self.mode == "weak":
            values["partition"]["clients"] = self.clients(ranks)
        return values


def read(out: Path) -> Scaling | None:
    """Reads the experiment in a folder; None if there is none.

    Raises:
        CheckpointError: its file is damaged.
    """
    path = out / FILE
    if not path.exists():
        return None
    try:
        return TypeAdapter(Scaling).validate_python(yaml_file.read(path))
    except (ConfigError, ValidationError) as error:
        raise CheckpointError(f"{path} is damaged; put it back from a copy, or choose another --out") from error


def join(new: Scaling, out: Path) -> Scaling:
    """Adds the points of the experiment in the folder, if that differs only in points and repeats.

    Raises:
        ConfigError: the folder holds another experiment, or other files.
    """
    before = read(out)
    if before is None:
        if out.is_dir() and (content := [path.name for path in out.iterdir() if not path.name.startswith(".")]):
            raise ConfigError(
                f"{out} holds no scaling experiment, but {join_truncated(sorted(content))}; choose another --out, or "
                "empty it"
            )
        return new
    if differences := _list_differences(before, new):
        raise ConfigError(
            f"{out} holds another scaling experiment: {join_truncated(differences)}; choose another --out"
        )
    ranks = tuple(sorted({*before.ranks, *new.ranks}))
    return replace(before, ranks=ranks, repeats=max(before.repeats, new.repeats))


def write(scaling: Scaling, out: Path) -> None:
    values = {**asdict(scaling), "ranks": list(scaling.ranks)}
    with atomic.explain_write_error(out / FILE, "choose another --out"):
        out.mkdir(parents=True, exist_ok=True)
        atomic.write(out / FILE, yaml_file.dump(values).encode())


def _list_differences(before: Scaling, now: Scaling) -> Sequence[str]:
    """The settings in which two experiments differ, except points and repeats, as text."""

    def values(scaling: Scaling) -> Mapping[str, Any]:
        own = {name: getattr(scaling, name) for name in ("mode", "rounds", "cores")}
        first = {"first number of --ranks": scaling.base} if before.mode == now.mode == "weak" else {}
        return {**own, **first, **by_key(scaling.config)}

    changed = find_differences(values(before), values(now))
    return [f"{key} = {old!r} there, {new!r} now" for key, (old, new) in changed.items()]


@dataclass(frozen=True)
class ScaleRun(PlannedRun):
    """A run of a point on `ranks` ranks; `repeat` counts from 1."""

    ranks: int
    repeat: int
    raw: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{pluralize(self.ranks, 'rank')}, repeat {self.repeat}"

    def run(self, out: Path) -> Path:
        return folder(out, self.ranks) / f"repeat{self.repeat}"

    def record(self, out: Path) -> Path:
        """The file with hardware, versions and digest of the run; see `records`."""
        return self._beside(out, "json")


def folder(out: Path, ranks: int) -> Path:
    return out / f"ranks-{ranks:04d}"


def runs(scaling: Scaling) -> list[ScaleRun]:
    """All runs in order of execution: one repeat of every point, then the next, as slow periods then affect all."""
    raw = {ranks: scaling.raw(ranks) for ranks in scaling.ranks}
    return [ScaleRun(ranks, repeat, raw[ranks]) for repeat in range(1, scaling.repeats + 1) for ranks in scaling.ranks]
