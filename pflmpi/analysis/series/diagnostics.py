"""What an algorithm shows besides scores, drawn by kind as the checkpoints describe it."""

from collections.abc import Sequence

import numpy as np

from pflmpi.analysis.checkpoint import Checkpoint
from pflmpi.analysis.plots import Matrices, Missing, Panel, Plot
from pflmpi.analysis.series import class_vectors, client_weights, entry_shares
from pflmpi.analysis.series.selection import ends
from pflmpi.analysis.series.values import kept_rows, label, rows, sentences
from pflmpi.learning.diagnostics import Category, ClassVectors, ClientWeights, Diagnostic, EntryShare, PerClient


def figures(checkpoints: Sequence[Checkpoint]) -> list[Plot | Missing]:
    """The figures of every diagnostic that the newest checkpoint describes.

    Args:
        checkpoints: of one run, ascending, at least one.

    Raises:
        CheckpointError: a file is damaged.
    """
    found: list[Plot | Missing] = []
    for name, diagnostic in checkpoints[-1].diagnostics.items():
        found += _drawn(checkpoints, name, diagnostic)
    return found


def over_rounds(checkpoints: Sequence[Checkpoint], name: str, diagnostic: PerClient | Category) -> Matrices | Missing:
    """A number of each client (rows) in each checkpoint (columns)."""
    values = np.full((checkpoints[-1].num_clients, len(checkpoints)), np.nan)
    for column, checkpoint in enumerate(checkpoints):
        if (found := rows(checkpoint, name, diagnostic)) is None:
            continue
        clients, numbers = found
        values[clients, column] = numbers[:, 0]
        if isinstance(diagnostic, PerClient) and diagnostic.known:
            known = kept_rows(checkpoint, diagnostic.known)
            values[np.arange(len(values)) if known is None else known[0][~known[1][:, 0]], column] = np.nan
    if isinstance(diagnostic, Category):
        values[values < 0] = np.nan
    if np.isnan(values).all():
        return Missing(diagnostic.title, "no checkpoint has a value of it yet")
    return Matrices(
        name=name,
        title=diagnostic.title,
        caption=sentences(diagnostic.caption, "An empty cell: not known" if np.isnan(values).any() else ""),
        row_label="client",
        column_label="round",
        value_label=label(name, diagnostic),
        panels=(Panel("", values, range(len(values)), [one.number for one in checkpoints]),),
        limits=diagnostic.limits if isinstance(diagnostic, PerClient) else None,
        categories=tuple(map(str, range(diagnostic.count))) if isinstance(diagnostic, Category) else (),
    )


def _drawn(checkpoints: Sequence[Checkpoint], name: str, diagnostic: Diagnostic) -> Sequence[Plot | Missing]:
    match diagnostic:
        case PerClient() | Category():
            return [over_rounds(checkpoints, name, diagnostic)]
        case EntryShare():
            return entry_shares.figures(checkpoints, name, diagnostic)
        case ClientWeights():
            return [client_weights.matrices(ends(checkpoints), name, diagnostic)]
        case ClassVectors():
            return class_vectors.projections(ends(checkpoints), name, diagnostic)
    return []  # of a kind that a newer version has
