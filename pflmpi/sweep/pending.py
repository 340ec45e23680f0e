"""What each cell of a sweep still needs, from what is on disk."""

import json
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pflmpi.config.load import Config
from pflmpi.config.yaml_file import dump
from pflmpi.errors import CheckpointError, ConfigError, UserError
from pflmpi.run.start import allowed_changes
from pflmpi.store import run_folder
from pflmpi.sweep.cells import Cell

State = Literal["start", "continue", "done", "other"]


@dataclass(frozen=True)
class Need:
    """What a run still needs.

    Attributes:
        state: what is to be done: "start", "continue", nothing ("done"), or nothing that is possible ("other": the run
            there was made with another configuration).
        done: rounds that need not be run again.
        problem: what is wrong with the run that is there, for "other" and for "start" over damaged checkpoints.
        changes: values that a continuation changes.
    """

    state: State
    done: int = 0
    problem: str = ""
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """A cell and what its run still needs.

    Attributes:
        state, done, problem: as of `Need`.
        rounds: of the whole run.
        command: arguments for `pflmpi`, none where there is nothing to start.
    """

    cell: Cell
    state: State
    done: int
    rounds: int
    command: tuple[str, ...] = ()
    problem: str = ""


def plan(cell: Cell, config: Config, out: Path, ranks: int | None) -> Work:
    """Return what a cell with this configuration needs, with its run below `out`; nothing is changed.

    Args:
        ranks: processes of the run; None where a launcher says it.
    """
    run, rounds = cell.run(out), config.training.rounds
    how = ("--quiet",) if ranks is None else ("--ranks", str(ranks), "--quiet")
    need = needed(run, config)
    if need.state == "start":
        command = ("run", str(cell.config(out)), "--out", str(run), *how)
    elif need.state == "continue":
        overrides = [word for key, value in need.changes.items() for word in ("-s", f"{key}={json.dumps(value)}")]
        command = ("resume", str(run), *overrides, *how)
    else:
        command = ()
    return Work(cell, need.state, need.done, rounds, command, need.problem)


def needed(run: Path, config: Config) -> Need:
    """Return what a run with this configuration still needs; nothing is changed."""
    rounds = config.training.rounds
    if not run_folder.rounds(run):
        return Need("start")
    try:
        changes = allowed_changes(run, config)
    except UserError as error:
        return Need("other", problem=str(error))
    try:
        done, _ = run_folder.newest_good(run)
    except CheckpointError as error:
        return Need("start", problem=str(error))
    if done > rounds:
        problem = f"{run} has gone on to round {done}, and training.rounds is {rounds} now; use another --out"
        return Need("other", problem=problem)
    if done == rounds:
        return Need("done", done)
    return Need("continue", done, changes={key: new for key, (_, new) in changes.items()})


def prepare(work: Work, out: Path) -> None:
    """Write the configuration of a cell beside its run; a run that has left no good checkpoint makes room.

    One with damaged checkpoints is kept aside, one that was stopped before its first is removed.
    """
    run, path = work.cell.run(out), work.cell.config(out)
    if work.state == "other":
        return
    try:
        if work.state == "start" and run.exists():
            if work.problem:
                run.rename(run.with_name(f"{run.name}.damaged-{time.time_ns()}"))
            else:
                shutil.rmtree(run)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dump(work.cell.raw))
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename or path}: {error.strerror}; choose another --out") from error
