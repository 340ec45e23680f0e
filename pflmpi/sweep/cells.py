"""The cells of a table: rows x columns x seeds, each with its configuration and its folder."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pflmpi.config.sections import located, merge, override
from pflmpi.errors import ConfigError
from pflmpi.sweep.planned_run import PlannedRun
from pflmpi.sweep.table import SweepTable, like, load, safe

if TYPE_CHECKING:
    from pflmpi.config.load import Config


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
        return out / safe(self.row) / safe(self.column) / f"seed{self.seed}"


def folder(path: Path, out: Path | None) -> Path:
    """Folder of a table's runs: `out`, or else one named like the file that has them."""
    return out or Path("sweeps") / Path(load(path).runs_of or path).stem


def cells(table: SweepTable, overrides: Sequence[str], num_seeds: int | None) -> list[Cell]:
    """Cells in the order of the file, seeds last.

    Args:
        overrides: `section.key=value`, applied last.
        num_seeds: use only this many seeds; None for all.
    """
    if num_seeds is not None and not 1 <= num_seeds <= len(table.seeds):
        raise ConfigError(f"--seeds {num_seeds}: the table has {len(table.seeds)}; give 1 to {len(table.seeds)}")
    if any(re.match(r"seed\b", text) for text in overrides):
        raise ConfigError("the seed cannot be overridden: the table's `seeds` give each cell its own; see --seeds")
    result = []
    for row in table.rows:
        for column in table.columns:
            raw = located(override(_sections(table, row, column), overrides), Path())
            result += [Cell(row, column, seed, {"seed": seed, **raw}) for seed in table.seeds[:num_seeds]]
    return result


def select(among: Sequence[Cell], patterns: Sequence[str]) -> list[Cell]:
    """Cells whose `row/column` matches one of the patterns, ignoring case; all if there are no patterns."""
    names = list(dict.fromkeys(f"{cell.row}/{cell.column}" for cell in among))
    for pattern in patterns:
        if not any(like(name.casefold(), pattern.casefold()) for name in names):
            raise ConfigError(f"--only {pattern!r} matches none of the cells {', '.join(names)}")
    return [
        cell
        for cell in among
        if not patterns or any(like(f"{cell.row}/{cell.column}".casefold(), one.casefold()) for one in patterns)
    ]


def selected(
    table: Path, overrides: Sequence[str], num_seeds: int | None, patterns: Sequence[str]
) -> "list[tuple[Cell, Config]]":
    """Cells selected by the options of a command, in the order of the file, each with its validated configuration.

    Every cell of the table is validated, even those not selected, unless there are overrides: they may suit only some.
    """
    from pflmpi.config import load as configuration  # here: it imports torch, which reports do without

    def parse(cell: Cell) -> "Config":
        try:
            return configuration.parse(cell.raw)
        except ConfigError as error:
            raise ConfigError(f"{cell.row}/{cell.column}: {error}") from error

    everything = cells(load(table), overrides, num_seeds)
    chosen = select(everything, patterns)
    configs = {cell.name: parse(cell) for cell in (chosen if overrides else everything)}
    return [(cell, configs[cell.name]) for cell in chosen]


def _sections(table: SweepTable, row: str, column: str) -> dict[str, Any]:
    layers = [table.columns[column], table.rows[row]]
    layers += [one.set for one in table.exceptions if like(row, one.row) and like(column, one.column)]
    raw = dict(table.base)
    try:
        for layer in layers:
            raw = merge(raw, layer)
    except ConfigError as error:
        raise ConfigError(f"{row}/{column}: {error}") from error
    return raw
