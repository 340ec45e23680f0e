"""What came of runs, a line each: accuracy, cost, cost to a target, gain over training alone."""

import math
from collections.abc import Sequence

import numpy as np

from pflmpi.analysis.comparable import compared_options
from pflmpi.analysis.metrics import best, cost_to, last
from pflmpi.analysis.run import Run
from pflmpi.analysis.selection import NamedRun
from pflmpi.analysis.series.clients import Final, against

Line = dict[str, str | int | float]

EXPLAINED = (
    "Best and last: accuracy, mean over clients; worst client: its accuracy at the end; lowest 10 %: mean over "
    "these clients at the end; unseen: the mean at the end of clients that were kept out of training, which count "
    "in nothing else; after training: of the participants, before the server answers; gain over local: accuracy at "
    "the end minus that of the same client in the run of local training (of the same seed, if any), mean over "
    "clients, and how many are below zero; bytes: what the messages of all rounds hold; time: that of all rounds; "
    "rounds, time and bytes (up and down) to an accuracy: until the first round whose mean is as high, empty where "
    "none is. Options that have unlike values follow the name."
)
_OF_BEST = 0.9  # of the best accuracy of all runs, to which costs are counted
_OPTIONAL = (
    "lowest 10 % (%)",
    "macro F1 (%)",
    "unseen (%)",
    "after training (%)",
    "gain over local",
    "clients below local",
)  # left out where empty


def summaries(runs: Sequence[NamedRun], ends: Sequence[Final | None], targets: Sequence[float] = ()) -> list[Line]:
    """The line of each run; a column that says nothing of any run is left out.

    Args:
        ends: the clients at the end of each.
        targets: accuracies, as shares.
    """
    gains = {one: gain for one, _, gain in against(runs, ends)[1]}
    options = compared_options([one.run for one in runs])
    lines: list[Line] = []
    for place, (one, end) in enumerate(zip(runs, ends, strict=True)):
        gain = gains.get(one)
        gain = None if gain is None or np.isnan(gain).all() else gain
        line: Line = {
            "run": one.label,
            "folder": str(one.run.path),
            **{key: texts[place] for key, texts in options.items()},
        }
        line |= results(one, end)
        line["gain over local"] = math.nan if gain is None else float(np.nanmean(gain))
        line["clients below local"] = "" if gain is None else int((gain < 0).sum())
        for target in targets:
            cost, to = cost_to(one.run.columns, target), f"to {100 * target:g} %"
            line[f"rounds {to}"] = "" if cost is None else cost.rounds
            line[f"time {to} (s)"] = math.nan if cost is None else cost.seconds
            line[f"bytes {to}"] = "" if cost is None else cost.up_bytes + cost.down_bytes
        lines.append(line)
    empty = [name for name in lines[0] if name in _OPTIONAL and all(str(line[name]) in ("", "nan") for line in lines)]
    return [{name: value for name, value in line.items() if name not in empty} for line in lines]


def results(one: NamedRun, end: Final | None) -> Line:
    """Results of a run by column, from its metrics and the clients' accuracies at its end; NaN where there is none."""
    columns = one.run.columns
    mean = 100 * columns["accuracy_mean"]
    highest = best(mean)
    tested = end is not None and not np.isnan(end.accuracy).all()

    def at_end(name: str) -> float:
        return 100 * last(columns.get(name, np.empty(0)))

    return {
        "rounds": len(columns["round"]),
        "of": int(one.run.config.get("training", {}).get("rounds", 0)),
        "best (%)": float("nan") if highest is None else float(mean[highest]),
        "in round": "" if highest is None else int(columns["round"][highest]),
        "last (%)": at_end("accuracy_mean"),
        "worst client (%)": float(np.nanmin(end.accuracy)) if end is not None and tested else float("nan"),
        "lowest 10 % (%)": at_end("accuracy_bottom"),
        "macro F1 (%)": at_end("f1_macro"),
        "unseen (%)": at_end("unseen_accuracy_mean"),
        "after training (%)": at_end("trained_accuracy_mean"),
        "up (bytes)": int(columns["up_bytes"].sum()),
        "down (bytes)": int(columns["down_bytes"].sum()),
        "time (s)": float(columns["seconds"].sum()),
    }


def cells(line: Line) -> list[str]:
    """Texts of a line of the table; unknown values are empty."""
    texts = [f"{value:.2f}" if isinstance(value, float) else str(value) for value in line.values()]
    return ["" if text == "nan" else text for text in texts]


def targets_of(runs: Sequence[Run]) -> list[float]:
    """The accuracies that a report counts the cost to: the highest that all runs reach, and 90 % of the best of all."""
    common = common_target(runs)
    best_of_all = max(_reached(runs), default=0.0)
    share = math.floor(1000 * _OF_BEST * best_of_all) / 1000
    return list(dict.fromkeys([*([] if common is None else [common]), *([share] if share > 0 else [])]))


def common_target(runs: Sequence[Run]) -> float | None:
    """The highest accuracy in whole percents that all runs reach in some round, as a share; None without any."""
    reached = _reached(runs)
    return math.floor(100 * min(reached)) / 100 if reached and min(reached) >= 0.01 else None


def _reached(runs: Sequence[Run]) -> list[float]:
    """The highest accuracy of each run that has been evaluated."""
    return [float(np.nanmax(mean)) for run in runs if not np.isnan(mean := run.columns["accuracy_mean"]).all()]
