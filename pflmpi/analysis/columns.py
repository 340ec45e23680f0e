"""metrics.csv by column."""

from collections.abc import Sequence

import numpy as np

from pflmpi.store import metrics_file
from pflmpi.store.verify import Metrics


def columns(metrics: Metrics) -> dict[str, np.ndarray]:
    """Verified metrics by column, each [rounds].

    Counts and bytes are int64; accuracies (fractions) and seconds are float64, NaN where a round has none.
    """
    rows = [text.split(",") for text in metrics.texts]
    return {name: _numbers(name, [row[place] for row in rows]) for place, name in enumerate(metrics.names)}


def last(values: np.ndarray) -> float:
    """The newest known value of a column; NaN without any."""
    known = values[~np.isnan(values)]
    return float(known[-1]) if len(known) else float("nan")


def best(values: np.ndarray) -> int | None:
    """The place of the highest known value of a column; None without any."""
    return None if np.isnan(values).all() else int(np.nanargmax(values))


def _numbers(name: str, texts: Sequence[str]) -> np.ndarray:
    kind = np.int64 if metrics_file.is_count(name) else np.float64
    return np.array([kind(text or "nan") for text in texts], kind)
