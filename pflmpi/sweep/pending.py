"""What each cell of a sweep still has to do, judged by its folder on disk."""

import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pflmpi.atomic import explain_write_error
from pflmpi.cluster.jobs import has_task_started
from pflmpi.cluster.waiting import is_done
from pflmpi.config.load import Config
from pflmpi.config.yaml_file import dump
from pflmpi.errors import CheckpointError, UserError
from pflmpi.experiment.recorded_data import check_data
from pflmpi.experiment.stored_config import allowed_changes, find_changed_code
from pflmpi.learning.early_stop import EarlyStop
from pflmpi.store import run_folder, run_lock, verify
from pflmpi.store.checked_hdf5 import UnreadableError
from pflmpi.sweep.table import PlannedRun

_log = logging.getLogger(__name__)

State = Literal["start", "continue", "done", "other"]


@dataclass(frozen=True)
class RunState:
    """State of a run's folder relative to a configuration.

    Attributes:
        state: what to do: "start", "continue", nothing ("done"), or nothing possible ("other": the run in the folder
            was made with another configuration or on other data, or another process writes it).
        done: rounds that are complete.
        problem: why the run in the folder cannot be used; for "other", and for "start" where a run with metrics lies.
        changes: configuration values that change on resume.
    """

    state: State
    done: int = 0
    problem: str = ""
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CellTask:
    """A run and what is left to do.

    Attributes:
        state, done, problem: as in `RunState`.
        rounds: of the whole run.
        command: arguments of `pflmpi`; empty if there is nothing to start.
    """

    cell: PlannedRun
    state: State
    done: int
    rounds: int
    command: tuple[str, ...] = ()
    problem: str = ""


def plan_cell(
    cell: PlannedRun, config: Config, out: Path, ranks: int | None, code_may_change: bool = False, anew: bool = False
) -> CellTask:
    """Finds out what is left to do for a cell with this configuration, whose run is below `out`; changes nothing.

    Args:
        ranks: of the run; None if a launcher sets them.
        code_may_change: as `--changed-code`.
        anew: whether a run that cannot continue is set aside and started anew.
    """
    run, rounds = cell.run(out), config.training.rounds
    how = ("--quiet",) if ranks is None else ("--ranks", str(ranks), "--quiet")
    status = find_run_state(run, config, code_may_change)
    if status.state == "other" and anew:
        status = replace(status, state="start", done=0)
    elif status.state == "other":
        problem = f"{status.problem}; or --anew starts it anew, and keeps this run"
        status = replace(status, done=0, problem=problem)
    command: tuple[str, ...] = ()
    if status.state == "start":
        command = ("run", str(cell.config(out)), "--out", str(run), "--continue", *how)
    elif status.state == "continue":
        overrides = [word for key, value in status.changes.items() for word in ("-s", f"{key}={json.dumps(value)}")]
        command = ("resume", str(run), *overrides, *how, *(["--changed-code"] if code_may_change else []))
    return CellTask(cell, status.state, status.done, rounds, command, status.problem)


def skip_if_running(task: CellTask, out: Path, jobs: Mapping[str, int] | None = None) -> CellTask:
    """Returns the task, or one without a command if another process writes the run.

    Args:
        jobs: the jobs that have started this process; see `store.run_lock.Owner`.
    """
    writer = run_lock.find_blocking_owner(task.cell.run(out), jobs or {}) if task.state != "done" else None
    if writer is None:
        return task
    problem = f"{task.cell.run(out)} is being written by {writer}; wait for it, or end it"
    return replace(task, state="other", command=(), problem=problem)


def has_failed(task: CellTask, out: Path) -> bool:
    """Whether a cell or its array task was started, and it is neither running nor done, nor `is_done_otherwise`."""
    run = task.cell.run(out)
    is_started = run.exists() or task.cell.log(out).exists() or has_task_started(out, run)
    return is_started and not (task.state == "done" or is_done_otherwise(task, out) or run_lock.find_owner(run))


def is_done_otherwise(task: CellTask, out: Path) -> bool:
    """Whether a run that cannot continue is done by its own configuration: the table or its data changed since."""
    return task.state in ("other", "start") and is_done(task.cell.run(out))


def find_run_state(run: Path, config: Config, code_may_change: bool = False) -> RunState:
    """Finds the state of a run's folder for this configuration."""
    rounds = config.training.rounds
    if link := next((path for path in (run, *run.parents) if path.is_symlink() and not path.exists()), None):
        problem = f"{link} is a link to {os.readlink(link)}, which is missing; make that folder, or remove the link"
        return RunState("other", problem=problem)
    if not run_folder.rounds(run):
        return RunState("start", problem=verify.explain_lost_checkpoints(run))
    try:
        changes = allowed_changes(run, config)
        find_changed_code(run, config, code_may_change)
        check_data(run, config, changes)
    except UserError as error:
        return RunState("other", problem=str(error))
    try:
        done, _ = verify.find_newest_good(run)
    except UnreadableError as error:
        return RunState("other", problem=str(error))
    except CheckpointError as error:
        return RunState("start", problem=str(error))
    if done > rounds:
        problem = f"{run} has reached round {done}, but training.rounds is {rounds} now; use another --out"
        return RunState("other", problem=problem)
    last = _find_last_round(run, config, done)
    if done > last:
        problem = f"{run} has reached round {done}, and training.stop ends it after round {last} now; use another --out"
        return RunState("other", problem=problem)
    return RunState("done", done) if done == last else RunState("continue", done, changes=changes)


def _find_last_round(run: Path, config: Config, done: int) -> int:
    """The round after which a run with a checkpoint of round `done` ends, also by `training.stop`."""
    training = config.training
    if training.stop is None:
        return training.rounds
    try:
        return EarlyStop(training.stop, verify.metrics(run, None).lines[:done]).last_round(training.rounds)
    except CheckpointError:
        return training.rounds  # resuming restores the metrics, and finds that nothing is left to do


def explain_unfinished(task: CellTask, config: Config, out: Path) -> str:
    """Why a run whose process ended with 0 is not complete, e.g. if its launcher has started no rank; "" if it is."""
    run = task.cell.run(out)
    done = max(run_folder.rounds(run), default=0)
    if done in (task.rounds, _find_last_round(run, config, done)):
        return ""
    return f"ended with 0 and {done} of {task.rounds} rounds: the launcher has started no rank, or has lost it"


def prepare_cell(task: CellTask, out: Path) -> None:
    """Writes the configuration of a cell beside its run.

    A run that cannot continue, or whose checkpoints are damaged or lost, is renamed.
    """
    run, path = task.cell.run(out), task.cell.config(out)
    if task.state == "other":
        return
    with explain_write_error(run.parent, "choose another --out"):
        if task.state == "start" and task.problem and os.path.lexists(run):
            aside = run.rename(run.with_name(f"old-{run.name}-{time.time_ns()}"))
            _log.warning("%s starts anew; its run is kept in %s: %s", task.cell.name, aside, task.problem)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dump(task.cell.raw))


MAX_EMPTY_STARTS = 5  # starts in a row without a complete round; the same in `cluster.batch_script`


def count_empty_start(task: CellTask, out: Path) -> bool:
    """Counts a start that was stopped; whether `MAX_EMPTY_STARTS` starts in a row have completed no round.

    Args:
        task: the cell as it was before that start.
    """
    run = task.cell.run(out)
    counter = run.with_name(f".{run.name}.empty")  # a byte for each start
    if max(run_folder.rounds(run), default=0) > task.done:
        counter.unlink(missing_ok=True)
        return False
    with counter.open("a") as file:
        file.write("x")
    if counter.stat().st_size < MAX_EMPTY_STARTS:
        return False
    counter.unlink()
    return True
