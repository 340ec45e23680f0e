"""The table of the runs of a report: the results of each in one line."""

from collections.abc import Mapping

import numpy as np

from pflmpi.analysis.series.final import Final
from pflmpi.analysis.series.selection import NamedRun

EXPLAINED = (
    "Best and last: accuracy, mean over clients; worst client: its accuracy at the end; bytes: what the messages of "
    "all rounds hold; time: that of all rounds."
)


def results(one: NamedRun, end: Final | None) -> dict[str, str | int | float]:
    """Results of a run by column, from its metrics and the clients' accuracies at its end; NaN where there is none."""
    columns = one.run.columns
    mean = 100 * columns["accuracy_mean"]
    seen = np.flatnonzero(~np.isnan(mean))
    best = int(seen[mean[seen].argmax()]) if len(seen) else None
    tested = end is not None and not np.isnan(end.accuracy).all()
    return {
        "run": one.label,
        "folder": str(one.run.path),
        "rounds": len(columns["round"]),
        "of": int(one.run.config.get("training", {}).get("rounds", 0)),
        "best (%)": float("nan") if best is None else float(mean[best]),
        "in round": "" if best is None else int(columns["round"][best]),
        "last (%)": float(mean[seen[-1]]) if len(seen) else float("nan"),
        "worst client (%)": float(np.nanmin(end.accuracy)) if end is not None and tested else float("nan"),
        "up (bytes)": int(columns["up_bytes"].sum()),
        "down (bytes)": int(columns["down_bytes"].sum()),
        "time (s)": float(columns["seconds"].sum()),
    }


def cells(row: Mapping[str, str | int | float]) -> list[str]:
    """Texts of a line of the table; unknown values are empty."""
    return [_text(value) for value in row.values()]


def _text(value: str | int | float) -> str:
    if isinstance(value, float):
        return "" if np.isnan(value) else f"{value:.2f}"
    return str(value)
