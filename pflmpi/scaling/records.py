"""Files beside the runs of a scaling experiment: what each run was, and what was predicted for its point."""

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pflmpi import atomic
from pflmpi.config import stored
from pflmpi.errors import ConfigError, UserError
from pflmpi.scaling.environment import environment
from pflmpi.scaling.points import ScaleRun, folder
from pflmpi.store import run_folder
from pflmpi.store.digest import digest

Record = dict[str, Any]


def plan_file(out: Path, ranks: int) -> Path:
    """File with what `plan` predicts for a point."""
    return folder(out, ranks) / "plan.json"


def record(one: ScaleRun, out: Path, nodes: int, environ: Mapping[str, str]) -> str:
    """Write the record of a run that has reached its end on so many nodes; what is wrong with it, or ""."""
    run = one.run(out)
    try:
        last, _ = run_folder.newest_good(run)
        found = stored.read(run)["recorded"]
        values: Record = {
            "ranks": one.ranks,
            "repeat": one.repeat,
            "digest": digest(run, last),
            "nodes": nodes,
            **{name: found[name] for name in ("device", "transport", "data")},
            **environment(environ, on_gpu=found["device"] != platform.machine()),
        }
    except UserError as error:
        return str(error)
    write(one.record(out), values)
    return ""


def failed(one: ScaleRun, out: Path, problem: str) -> None:
    """Record why a run has failed; it is made again the next time."""
    write(one.record(out), {"ranks": one.ranks, "repeat": one.repeat, "problem": problem})


def write(path: Path, values: Record) -> None:
    """Write a record."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, json.dumps(values, indent=1).encode())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; {atomic.remedy(error)}") from error


def read(path: Path) -> Record:
    """A record; {} where there is none, or it is damaged: the run is then made again."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def done(one: ScaleRun, out: Path) -> bool:
    """Whether a run has been measured."""
    return "digest" in read(one.record(out))
