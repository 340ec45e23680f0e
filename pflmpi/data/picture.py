"""Draws a partition in the terminal: one line per client, one shaded cell per class."""

from collections.abc import Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from pflmpi.data.federation import Federation

SHADES = " ░▒▓█"  # 0, up to a quarter of the largest cell, ...; readable without colour
MARGIN = "{:>6} {:>6} {:>5} {:>4}  "  # client, training samples, test samples, classes held
MAX_CLIENTS = 20  # drawn; of the others only the number is given


def draw_partition(federation: Federation, width: int) -> RenderableType:
    """Draws the training samples of each client and class, at most `width` columns wide, but at least 40.

    Only the first `MAX_CLIENTS` are drawn.
    """
    counts = federation.class_counts
    shown = min(federation.num_clients, MAX_CLIENTS)
    cells = _Cells(counts, max(width, 40) - len(MARGIN.format("", "", "", "")))
    header = MARGIN.format("client", "train", "test", "cls") + cells.header(federation.dataset.label_numbers)
    lines = [Text(header, style="bold")]
    for client in range(shown):
        classes_held = int((counts[client] > 0).sum())
        margin = MARGIN.format(client, federation.num_train[client], federation.num_test[client], classes_held)
        lines.append(Text(margin).append(cells.row(counts[client]), style="cyan"))
    if shown < federation.num_clients:
        lines.append(Text(f"... and {federation.num_clients - shown} more", style="dim"))
    lines += [Text(line) for line in _summarise(federation, cells)]
    for line in lines:
        line.no_wrap = True
    return Group(*lines)


class _Cells:
    """Layout of the cells that show class counts, in a number of columns."""

    def __init__(self, counts: np.ndarray, columns: int) -> None:
        num_classes = counts.shape[1]
        digits = len(str(counts.max()))
        self.per_cell = -(-num_classes // columns)  # classes per cell, if there are too many for one each
        self.num_cells = -(-num_classes // self.per_cell)
        width = columns // self.num_cells
        self.show_counts = width > digits and self.per_cell == 1  # a shade, the count and, if it fits, a space
        self.cell_width = min(width, digits + 2) if self.show_counts else min(width, 2)
        self.largest = self._merge(counts).max()

    def _merge(self, counts: np.ndarray) -> np.ndarray:
        """Sums neighbouring classes: counts [..., K] to counts [..., cells]."""
        padding = self.num_cells * self.per_cell - counts.shape[-1]
        padded = np.pad(counts, [(0, 0)] * (counts.ndim - 1) + [(0, padding)])
        return np.asarray(padded.reshape(*counts.shape[:-1], self.num_cells, self.per_cell).sum(axis=-1))

    def row(self, counts: np.ndarray) -> str:
        """Draws the cells of one client with the given counts [K]."""
        cells = []
        for count in self._merge(counts).tolist():
            shade = SHADES[-(-count * (len(SHADES) - 1) // int(self.largest))]
            if self.show_counts:
                cells.append(f"{shade}{count or '':<{self.cell_width - 1}}")
            else:
                cells.append(shade * self.cell_width)
        return "".join(cells)

    def header(self, labels: Sequence[str]) -> str:
        """Writes labels [K] above their cells, as many as fit."""
        line = ""
        for cell in range(self.num_cells):
            label = labels[cell * self.per_cell]
            start = cell * self.cell_width + int(self.show_counts)  # above the count, if shown
            # A label may be wider than its cell: the next ones are left out until there is a gap.
            if start >= len(line) + bool(line) and start + len(label) <= self.num_cells * self.cell_width:
                line = line.ljust(start) + label
        return line

    def legend(self) -> str:
        """Explains the shades."""
        merged = f", {self.per_cell} classes to a cell" if self.per_cell > 1 else ""
        return f"shades: {SHADES[1:]} up to 1/4, 1/2, 3/4 and all of {self.largest}{merged}"


def _summarise(federation: Federation, cells: _Cells) -> list[str]:
    train, test, classes_held = federation.num_train, federation.num_test, (federation.class_counts > 0).sum(axis=1)
    validation = federation.num_validation if federation.validation else np.zeros_like(train)
    num_validation = f", {validation.sum()} validation" if validation.any() else ""
    lines = [
        cells.legend(),
        f"{federation.num_clients} clients, {train.sum()} training{num_validation} and {test.sum()} test samples "
        f"of {federation.dataset.name}",
        f"samples per client: {_format_range(train + validation + test)}",
        f"classes per client: {_format_range(classes_held)} of {federation.dataset.num_strata}",
    ]
    if federation.num_shared:
        lines.append(f"{federation.num_shared} samples are held by more than one client")
    return [*lines, f"hash {federation.digest}"]


def _format_range(values: np.ndarray) -> str:
    return f"min {values.min()}, median {np.median(values):g}, max {values.max()}"
