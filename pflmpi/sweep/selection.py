"""The cells of a table that a command is about, each with its validated configuration."""

from collections.abc import Sequence
from pathlib import Path

from pflmpi.config import load as configuration
from pflmpi.config.load import Config
from pflmpi.errors import ConfigError
from pflmpi.sweep import table as tables
from pflmpi.sweep.cells import Cell, cells, select


def chosen(
    table: Path, overrides: Sequence[str], num_seeds: int | None, patterns: Sequence[str]
) -> list[tuple[Cell, Config]]:
    """Return the cells that the options of a command choose, in the order of the file.

    Every cell of the table is validated, also those that are not chosen.
    """
    all_cells = cells(tables.load(table), overrides, num_seeds)
    configs = {cell.name: _parse(cell) for cell in all_cells}
    return [(cell, configs[cell.name]) for cell in select(all_cells, patterns)]


def _parse(cell: Cell) -> Config:
    try:
        return configuration.parse(cell.raw)
    except ConfigError as error:
        raise ConfigError(f"{cell.row}/{cell.column}: {error}") from error
