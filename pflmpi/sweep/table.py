"""A table of a paper as a YAML file: rows x columns x seeds, and the published results.

title: FedGMH, table 2          source: Sun and Ni 2026, table 2
metric: weighted                figure: best              seeds: [0, 1, 2]
base: {training: {...}}         configuration sections of all cells
columns: {MNIST: {...}}         configuration sections of each column and row
rows: {FedAvg: {algorithm: {name: fedavg}}}
exceptions: [{row: Fed*, column: MNIST, set: {training: {lr: 0.1}}}]
published: {FedAvg: {MNIST: [88.30, 0.95]}}
notes: [...]
runs_of: fedgmh_table2.yaml     instead of base, columns, rows, exceptions and seeds: another metric of the same runs

Each cell, a row, a column and a seed, is one run with its own configuration and folder.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from pflmpi.config import yaml_file
from pflmpi.config.sections import KEYS, located, merge, override, section
from pflmpi.errors import ConfigError
from pflmpi.registry import format_unknown_name
from pflmpi.store import metrics_file

if TYPE_CHECKING:
    from pflmpi.config.load import Config

# YAML reads names and patterns such as 10 or 0.5 as numbers, and people write 80.4 for [80.4].
Name = Annotated[str, BeforeValidator(lambda name: str(name) if type(name) in (int, float) else name)]
Published = Annotated[
    list[Annotated[float, Field(allow_inf_nan=False)]],
    BeforeValidator(lambda value: value if isinstance(value, list) else [value]),
    Field(min_length=1, max_length=2),
]
Sections = dict[str, Any]


_METRICS = ("mean", "weighted", "spread", "bottom", "f1", "unseen", "train_loss", "test_loss", "parameters")
_RUN_KEYS = ("base", "columns", "rows", "exceptions", "seeds")


class ExceptionRule(BaseModel):
    """Configuration sections for some cells, selected by shell patterns."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    row: Name = "*"
    column: Name = "*"
    set: Sections


class Range(BaseModel):
    """Range of numbers for a search, uniform or log-uniform; integers if both ends are.

    >>> rng = np.random.default_rng(0)
    >>> Range(low=1, high=9).draw(rng), Range(low=0.01, high=1.0, log=True).draw(rng)
    (8, 0.03464)
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    low: int | float
    high: int | float
    log: bool = False

    @model_validator(mode="after")
    def _in_order(self) -> "Range":
        if not 0 < self.high - self.low < math.inf or (self.log and self.low <= 0):
            raise ValueError(f"from {self.low} to {self.high}: low must be below high, and with log above 0")
        return self

    def draw(self, rng: np.random.Generator) -> int | float:
        """Draws a number; floats are rounded to 4 digits."""
        whole = isinstance(self.low, int) and isinstance(self.high, int)
        if whole and not self.log:
            return int(rng.integers(int(self.low), int(self.high) + 1))
        value = (
            math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
            if self.log
            else rng.uniform(self.low, self.high)
        )
        return round(value) if whole else float(f"{value:.4g}")


class SweepTable(BaseModel):
    """The contents of a table file.

    Attributes:
        metric: None, the main measure of the runs; `mean`, the plain mean of the accuracy over clients; `weighted`,
            over all samples; `spread`, its standard deviation over clients; `bottom`, the mean over the lowest 10 % of
            clients; `f1`, macro F1; `unseen`, the plain mean over unseen clients (`evaluation.unseen`); `train_loss`
            and `test_loss`, as in metrics.csv; `parameters`, thousands of 4-byte values that all participants together
            send in a round; or a column of a measure in `evaluation.measures`, such as `auroc_mean`.
        target: an accuracy, as a share; how many rounds and bytes it took to reach its mean is then printed too.
        figure: which value the paper prints: the best round's (for `spread` the round of the best mean, for losses
            the lowest), among the last twenty rounds alone, the last round's, or the mean of the last ten rounds.
        published: by row and column, a figure (of accuracies in percent) and, where given, its spread.
        search: by patterns of rows, what `pflmpi search` draws: for `section.key` a range or a list of values, null
            for nothing; besides the learning rate and what the algorithm declares.
        runs_of: the file, in the same folder, whose runs these are; "" for its own.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    source: str
    metric: str | None = None
    target: Annotated[float, Field(gt=0, le=1)] | None = None
    figure: Literal["best", "best20", "last", "last10"] = "best"
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    base: Sections = {}
    columns: Annotated[dict[Name, Sections], Field(min_length=1)]
    rows: Annotated[dict[Name, Sections], Field(min_length=1)]
    exceptions: list[ExceptionRule] = []
    published: dict[Name, dict[Name, Published]] = {}
    notes: list[str] = []
    search: dict[Name, dict[str, Range | Annotated[list[Any], Field(min_length=1)] | None]] = {}
    runs_of: str = ""

    @field_validator("metric")
    @classmethod
    def _is_known(cls, metric: str | None) -> str | None:
        if metric is not None and metric not in _METRICS and not metrics_file.select_measure_columns([metric]):
            raise ValueError(f"must be one of {', '.join(_METRICS)}, or a measure's column, such as auroc_mean")
        return metric


def load(path: Path) -> SweepTable:
    """Reads and checks a table; the configurations in it are not validated."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give a table file, YAML with title, source, seeds, rows and columns")
    raw = yaml_file.read(path)
    if "runs_of" in raw:
        raw = {**_read_runs_of(path, raw), **raw}
    try:
        table = _locate(section("table", SweepTable, raw), path.parent)
        _check(table)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return table


def dump(table: SweepTable) -> str:
    """Formats a table as YAML, which has its runs itself instead of `runs_of`."""
    return yaml_file.dump(table.model_dump(exclude_defaults=True, exclude={"runs_of"}))


def _read_runs_of(path: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that decide the runs, from the file that `runs_of` names."""
    name, own = str(raw["runs_of"]), [key for key in _RUN_KEYS if key in raw]
    other = path.parent / name
    if name != other.name:
        raise ConfigError(f"{path}: runs_of = {name!r} is not in the folder of this file; name one that is")
    if own:
        raise ConfigError(f"{path}: {own[0]} is that of {other.name}, which runs_of names; leave one of the two out")
    sections = yaml_file.read(other)
    if "runs_of" in sections:
        raise ConfigError(f"{path}: runs_of = {other.name!r} has no runs of its own; name {sections['runs_of']!r}")
    return {key: sections[key] for key in _RUN_KEYS if key in sections}


def make_path_safe(name: str) -> str:
    """Makes a name safe for a path.

    >>> make_path_safe("FedPM (mh), K=10")
    'FedPM_mh_K=10'
    """
    return re.sub(r"[^\w.+=-]+", "_", name).strip("_.-")


def matches_pattern(name: str, pattern: str) -> bool:
    """Whether a name equals a pattern or matches it as a shell pattern."""
    return name == pattern or fnmatchcase(name, pattern)  # a name may contain brackets


def _locate(table: SweepTable, folder: Path) -> SweepTable:
    """The table with paths in its sections made absolute."""
    changes = {
        "base": located(table.base, folder),
        "columns": {name: located(sections, folder) for name, sections in table.columns.items()},
        "rows": {name: located(sections, folder) for name, sections in table.rows.items()},
        "exceptions": [rule.model_copy(update={"set": located(rule.set, folder)}) for rule in table.exceptions],
    }
    return table.model_copy(update=changes)


def _check(table: SweepTable) -> None:
    if len(set(table.seeds)) < len(table.seeds):
        raise ConfigError(f"table.seeds = {table.seeds}: give each seed once")
    layers = {"base": table.base}
    layers |= {f"columns.{name}": sections for name, sections in table.columns.items()}
    layers |= {f"rows.{name}": sections for name, sections in table.rows.items()}
    layers |= {f"exceptions.{number}.set": rule.set for number, rule in enumerate(table.exceptions)}
    for where, sections in layers.items():
        _check_keys(where, sections)
    _check_names("rows", table.rows)
    _check_names("columns", table.columns)
    for number, rule in enumerate(table.exceptions):
        for kind, pattern, names in (("row", rule.row, table.rows), ("column", rule.column, table.columns)):
            if not any(matches_pattern(name, pattern) for name in names):
                raise ConfigError(f"exceptions.{number}.{kind} = {pattern!r} matches none of {', '.join(names)}")
    for pattern, ranges in table.search.items():
        if not any(matches_pattern(name, pattern) for name in table.rows):
            raise ConfigError(f"search: {pattern!r} matches none of the rows {', '.join(table.rows)}")
        for key in ranges:
            if key == "seed" or "." not in key:
                raise ConfigError(f"search.{pattern}: {key!r} is no section.key that can be drawn, such as training.lr")
            _check_keys(f"search.{pattern}", {key.partition(".")[0]: {}})
    for row, columns in table.published.items():
        if row not in table.rows:
            raise ConfigError(f"published: {format_unknown_name('row', row, list(table.rows))}")
        for column in columns:
            if column not in table.columns:
                raise ConfigError(f"published.{row}: {format_unknown_name('column', column, list(table.columns))}")


def _check_keys(where: str, sections: Mapping[str, Any]) -> None:
    if "seed" in sections:
        raise ConfigError(f"{where}.seed: a cell cannot set the seed; list all seeds in `seeds`")
    for key in sections:
        if key not in KEYS:
            raise ConfigError(f"{where}: {format_unknown_name('section', key, list(KEYS[1:]))}")


def _check_names(kind: str, names: Iterable[str]) -> None:
    folders: dict[str, str] = {}
    for name in names:
        folder = make_path_safe(name).casefold()  # some file systems ignore case
        if not folder:
            raise ConfigError(f"{kind}: {name!r} cannot name a folder; it needs a letter or digit")
        if folder in folders:
            raise ConfigError(
                f"{kind}: {folders[folder]!r} and {name!r} give the same folder, {make_path_safe(name)}; rename one"
            )
        folders[folder] = name


class PlannedRun(ABC):
    """A run of a sweep or of a scaling experiment."""

    raw: dict[str, Any]  # its configuration, not validated

    @property
    @abstractmethod
    def name(self) -> str:
        """Unique among the runs of a command; for display."""

    @abstractmethod
    def run(self, out: Path) -> Path:
        """Folder of the run, below `out`."""

    def config(self, out: Path) -> Path:
        """Configuration file, beside the run."""
        return self._beside(out, "yaml")

    def log(self, out: Path) -> Path:
        """Log file, beside the run."""
        return self._beside(out, "log")

    def _beside(self, out: Path, kind: str) -> Path:
        run = self.run(out)
        return run.with_name(f"{run.name}.{kind}")


@dataclass(frozen=True)
class Cell(PlannedRun):
    """A cell of the table with one seed: one run."""

    row: str
    column: str
    seed: int
    raw: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.row}/{self.column}/seed{self.seed}"

    def run(self, out: Path) -> Path:
        return out / make_path_safe(self.row) / make_path_safe(self.column) / f"seed{self.seed}"


def find_sweep_folder(path: Path, out: Path | None) -> Path:
    """Folder of a table's runs: `out`, else one named after the file that defines the runs."""
    return out or Path("sweeps") / Path(load(path).runs_of or path).stem


def list_cells(table: SweepTable, overrides: Sequence[str], num_seeds: int | None) -> list[Cell]:
    """Lists the cells in the order of the file, seeds last.

    Args:
        overrides: `section.key=value`, applied last.
        num_seeds: number of seeds to use; None for all.
    """
    if num_seeds is not None and not 1 <= num_seeds <= len(table.seeds):
        raise ConfigError(f"--seeds {num_seeds}: the table has {len(table.seeds)}; give 1 to {len(table.seeds)}")
    if any(re.match(r"seed\b", text) for text in overrides):
        raise ConfigError("the seed cannot be overridden: the table's `seeds` give each cell its own; see --seeds")
    all_cells = []
    for row in table.rows:
        for column in table.columns:
            raw = located(override(_sections(table, row, column), overrides), Path())
            all_cells += [Cell(row, column, seed, {"seed": seed, **raw}) for seed in table.seeds[:num_seeds]]
    return all_cells


def select_cells(all_cells: Sequence[Cell], patterns: Sequence[str]) -> list[Cell]:
    """Selects cells whose `row/column` matches one of the patterns, ignoring case; all if there are no patterns."""
    if not patterns:
        return [*all_cells]
    pairs = list(dict.fromkeys((cell.row, cell.column) for cell in all_cells))
    names = [f"{row}/{column}" for row, column in pairs]
    selected_names: set[str] = set()
    for pattern in patterns:
        matches = [name for name in names if matches_pattern(name.casefold(), pattern.casefold())]
        if not matches:
            rows, columns = (", ".join(dict.fromkeys(values)) for values in zip(*pairs, strict=True))
            raise ConfigError(
                f"--only {pattern!r} matches none of the cells ROW/COLUMN; rows: {rows}; columns: {columns}"
            )
        selected_names.update(matches)
    return [cell for cell in all_cells if f"{cell.row}/{cell.column}" in selected_names]


def load_cells(
    table: Path, overrides: Sequence[str], num_seeds: int | None, patterns: Sequence[str]
) -> "list[tuple[Cell, Config]]":
    """Returns the selected cells in the order of the file, each with its validated configuration.

    Without overrides all cells of the table are validated; overrides may suit only the selected ones.
    """
    from pflmpi.config import load as configuration  # here: imports torch, which reports do without

    def parse(cell: Cell) -> "Config":
        try:
            return configuration.parse(cell.raw)
        except ConfigError as error:
            raise ConfigError(f"{cell.row}/{cell.column}: {error}") from error

    all_cells = list_cells(load(table), overrides, num_seeds)
    selected_cells = select_cells(all_cells, patterns)
    configs = {cell.name: parse(cell) for cell in (selected_cells if overrides else all_cells)}
    return [(cell, configs[cell.name]) for cell in selected_cells]


def _sections(table: SweepTable, row: str, column: str) -> dict[str, Any]:
    layers = [table.columns[column], table.rows[row]]
    layers += [
        rule.set for rule in table.exceptions if matches_pattern(row, rule.row) and matches_pattern(column, rule.column)
    ]
    raw = dict(table.base)
    try:
        for layer in layers:
            raw = merge(raw, layer)
    except ConfigError as error:
        raise ConfigError(f"{row}/{column}: {error}") from error
    return raw
