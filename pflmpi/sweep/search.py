"""Hyperparameter search by successive halving, with as many trials for every row of a table.

Trials are drawn at random from ranges and compared on validation samples. Each step is a table of its own, with three
times the rounds of the one before and a third of its trials, which resume from their checkpoints.
"""

import glob
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pflmpi import atomic
from pflmpi.config.sections import by_key, override
from pflmpi.errors import ConfigError
from pflmpi.rng import stream
from pflmpi.sweep.table import Cell, Range, SweepTable, dump, make_path_safe, matches_pattern

if TYPE_CHECKING:
    from pflmpi.config.load import Config

_FACTOR = 3  # of rounds, and of trials, from one step to the next
_COLUMN = "trial"  # the only column of a step's table, whose rows are the trials
COMMON: Mapping[str, Range] = {"training.lr": Range(low=0.001, high=1.0, log=True)}


@dataclass(frozen=True)
class Trial:
    """A cell of the table with other values of some settings."""

    name: str  # the row of the step's table, and of the folder; no other trial has it
    row: str
    column: str
    number: int  # trial 0 has the settings of the table
    raw: dict[str, Any]  # its configuration
    rounds: int  # of the last step
    values: Mapping[str, Any]  # the drawn values by dotted key


def count_rounds(step: int, steps: int, rounds: int) -> int:
    """Number of rounds of a trial after a step (counted from 0), if it has `rounds` after the last step.

    >>> [count_rounds(step, 3, 90) for step in range(3)], [count_rounds(step, 3, 2) for step in range(3)]
    ([10, 30, 90], [1, 1, 2])
    """
    return max(1, round(rounds / float(_FACTOR ** (steps - 1 - step))))


def count_trials(step: int, budget: int) -> int:
    """Number of trials of a cell in a step.

    >>> [count_trials(step, 20) for step in range(3)]
    [20, 7, 3]
    """
    return math.ceil(budget / float(_FACTOR**step))


def draw_trials(
    table: SweepTable, cells: "Sequence[tuple[Cell, Config]]", budget: int, seed: int, overrides: Sequence[str] = ()
) -> dict[tuple[str, str], list[Trial]]:
    """Draws `budget` trials for each row and column; the first ones are the same for any budget.

    Args:
        cells: one for each row and column.
        overrides: of the command line; keys that they set are not drawn.

    Raises:
        ConfigError: trials of two cells would share a folder.
    """
    drawn, fixed = {}, by_key(override({}, overrides))
    folders: dict[str, str] = {}
    for cell, config in cells:
        cell_name = f"{cell.row}, {cell.column}"
        if other := folders.get(folder := make_path_safe(f"{cell_name}, 0").casefold()):
            raise ConfigError(f"trials of {other!r} and {cell_name!r} would share folders; rename a row or column")
        folders[folder] = cell_name
        own = {
            f"algorithm.{name}": Range(low=low, high=high, log=bool(log))
            for name, (low, high, *log) in config.algorithm.search.items()
            if name not in config.algorithm.without_effect()
        }
        ranges: dict[str, Any] = {**COMMON, **own}
        for pattern, of_rows in table.search.items():
            ranges |= of_rows if matches_pattern(cell.row, pattern) else {}
        ranges = {key: values for key, values in ranges.items() if values is not None and key not in fixed}
        of_cell = []
        for number in range(budget):
            values = {} if number == 0 else {key: _draw(key, ranges[key], cell.row, number, seed) for key in ranges}
            raw = override(cell.raw, [f"{key}={json.dumps(value)}" for key, value in values.items()])
            raw = _fix_schedule({**raw, "seed": seed}, config)
            name = f"{cell_name}, {number}"
            of_cell.append(Trial(name, cell.row, cell.column, number, raw, config.training.rounds, values))
        drawn[cell.row, cell.column] = of_cell
    return drawn


def _draw(key: str, values: Range | Sequence[Any], row: str, number: int, seed: int) -> Any:
    rng = stream(seed, number, -1, f"search/{row}/{key}")
    return values.draw(rng) if isinstance(values, Range) else values[int(rng.integers(len(values)))]


def _fix_schedule(raw: dict[str, Any], config: "Config") -> dict[str, Any]:
    """Writes out the length of a cosine schedule over all rounds, so that a trial can be resumed to more rounds."""
    training = config.training
    if training.schedule != "cosine" or training.decay_rounds is not None:
        return raw
    of_trial = raw.get("training", {})
    decay_rounds = max(training.rounds - of_trial.get("warmup", training.warmup), 1)
    return {**raw, "training": {**of_trial, "decay_rounds": decay_rounds}}


def build_step_table(table: SweepTable, trials: Sequence[Trial], step: int, steps: int, seed: int) -> SweepTable:
    """Builds the table of a step; its rows are the trials."""
    rows = {trial.name: _sections(trial.raw, rounds=count_rounds(step, steps, trial.rounds)) for trial in trials}
    about = {"title": f"Trials of: {table.title}", "source": "none; a step of a search", "seeds": [seed]}
    return SweepTable.model_validate({**about, "columns": {_COLUMN: {}}, "rows": rows})


def build_tuned_table(table: SweepTable, best: Sequence[Trial], budget: int) -> SweepTable:
    """Builds the table with the settings of the best trial in each cell, and the seeds of the given table."""
    exceptions = [
        {"row": glob.escape(trial.row), "column": glob.escape(trial.column), "set": _sections(trial.raw)}
        for trial in best
    ]
    note = f"every cell has the settings of the best of {budget} trials on validation samples, with another seed"
    no_sections: dict[str, Any] = {
        "base": {},
        "rows": {name: {} for name in table.rows},
        "columns": {name: {} for name in table.columns},
    }
    changes = {**no_sections, "exceptions": exceptions, "search": {}, "runs_of": ""}
    return SweepTable.model_validate({**table.model_dump(), **changes, "notes": [*table.notes, note]})


def _sections(raw: Mapping[str, Any], **training: Any) -> dict[str, Any]:
    """The sections of a configuration, without the seed."""
    sections = {name: value for name, value in raw.items() if name != "seed"}
    return {**sections, "training": {**(sections.get("training") or {}), **training}}


def write_table(table: SweepTable, path: Path) -> None:
    """Writes a table as a file that `sweep` and `table` read."""
    with atomic.explain_write_error(path, "choose another --out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, dump(table).encode())
