"""Which figures a report over runs has, in their order; each is made when its turn comes."""

from collections.abc import Callable, Sequence

from pflmpi.analysis.plots import Missing, Plot
from pflmpi.analysis.run import Round, Run
from pflmpi.analysis.series import final, kept, partition, probes, projection, rounds, scores, similarity
from pflmpi.analysis.series.final import Final
from pflmpi.analysis.series.selection import Shown, spread_over
from pflmpi.errors import CheckpointError

MOST_DETAILED = 8  # runs whose checkpoints are looked into
_MOST_MATRICES_OVER_ROUNDS = 12  # checkpoints from which the weights of all clients are read

Found = list[Plot | Missing]


def compared(runs: Sequence[Shown], ends: Sequence[Final | None]) -> Found:
    """Return the figures that show all runs."""
    return [
        scores.accuracy_over_rounds(runs),
        scores.accuracy_against_bytes(runs),
        scores.accuracy_against_seconds(runs),
        final.distribution(runs, ends),
        final.against_local(runs, ends),
    ]


def detailed(one: Shown, alone: bool) -> tuple[Found, list[str]]:
    """Return the figures of one run, and what of it could not be read.

    Args:
        alone: whether it is the only run, whose accuracy `compared` shows already.
    """
    states = _good(one.run, spread_over(one.run.rounds))
    found: Found = [] if alone else [scores.accuracy_over_rounds([one])]
    found += [rounds.bytes_per_round(one), rounds.seconds_per_round(one), partition.partition(one.run)]
    if not states:
        return [*found, Missing("Checkpoints", f"{one.run.path} has no good checkpoint")], []
    few = _some(states, _MOST_MATRICES_OVER_ROUNDS)
    problems: list[str] = []
    makers: dict[str, Callable[[], Sequence[Plot | Missing]]] = {
        "What the algorithm keeps": lambda: kept.kept(one.run, states),
        "Class means": lambda: projection.projections(kept.ends(states)),
        "Similarity of the clients' layers": lambda: _similarity(few),
        "CKA of the clients' layers": lambda: probes.probes(one.run),
    }
    for title, make in makers.items():
        try:
            found += make()
        except CheckpointError as error:
            problems.append(str(error))
            found.append(Missing(title, str(error)))
    return found, problems


def _similarity(states: Sequence[Round]) -> Found:
    matrix = similarity.matrices(states[-1])
    return [matrix] if isinstance(matrix, Missing) else [matrix, similarity.over_rounds(states)]


def _good(run: Run, numbers: Sequence[int]) -> list[Round]:
    """Return the checkpoints of these rounds whose files can be opened."""
    found = []
    for number in numbers:
        try:
            state = run.round(number)
            state.cohorts  # noqa: B018  the file is opened here
        except CheckpointError:
            continue  # `comparing.damaged` has told of it
        found.append(state)
    return found


def _some(states: Sequence[Round], most: int) -> list[Round]:
    chosen = set(spread_over([state.number for state in states], most))
    return [state for state in states if state.number in chosen]
