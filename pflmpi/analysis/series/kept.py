"""What an algorithm keeps, by algorithm: which figures show it."""

from collections.abc import Callable, Sequence

from pflmpi.analysis.plots import Missing, Plot
from pflmpi.analysis.run import Round, Run
from pflmpi.analysis.series import candidates, critical, fusion, ratios
from pflmpi.analysis.series.selection import spread_over

Found = list[Plot | Missing]

_KEPT: dict[str, Callable[[Run, Sequence[Round]], Found]] = {
    "pfedafe": lambda run, states: [ratios.mixing_ratio(states)],
    "apfl": lambda run, states: [ratios.own_share(states)],
    "fesem": lambda run, states: [ratios.clusters(states)],
    "fedgmh": lambda run, states: [critical.over_rounds(states), critical.matrix(states[-1])],
    "fedamp": lambda run, states: [fusion.fedamp(run, ends(states))],
    "pfedcfr": lambda run, states: [*fusion.pfedcfr(run, ends(states))],
    "fedfomo": lambda run, states: [candidates.shares(ends(states)), candidates.affinities(ends(states))],
}


def kept(run: Run, states: Sequence[Round]) -> Found:
    """Return the figures of what a run's algorithm keeps beside models; empty for one that keeps nothing more.

    Args:
        states: checkpoints of the run, ascending, at least one.
    """
    figures = _KEPT.get(str(run.config.get("algorithm", {}).get("name")))
    return [] if figures is None else figures(run, states)


def ends(states: Sequence[Round]) -> list[Round]:
    """Return the first, the middle and the last of the checkpoints; not the one before the first round."""
    trained = [state for state in states if state.number > 0] or list(states)
    chosen = set(spread_over([state.number for state in trained], 3))
    return [state for state in trained if state.number in chosen]
