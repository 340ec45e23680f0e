"""The rounds of a run before they happen: who trains and is tested where, what is saved, which calls are made.

A pure function of the setup. The loop, the checkpoints and `plan` read it.
"""

from collections.abc import Iterator

import numpy as np

from pflmpi.messages.kinds import Own, OwnClasses
from pflmpi.runtime.round_schedule import RoundSchedule
from pflmpi.runtime.setup import Setup


def schedule(setup: Setup, done: int | None) -> Iterator[RoundSchedule]:
    """The opening, then every round to the last.

    Args:
        setup: of the run.
        done: the round to continue after; None for a new run.
    """
    training, everyone = setup.task.training, np.arange(setup.task.num_clients)
    nobody = everyone[:0]
    new, first = done is None, done or 0
    before, upcoming = _participants(setup, first), _participants(setup, first + 1)
    yield RoundSchedule(
        setup,
        round=first,
        opening=True,
        participants=everyone if new and setup.algorithm.introduces else nobody,
        receivers=_receivers(setup, first, before, upcoming),
        evaluates=False,
        tested=nobody,
        saves=new,
        unsaved=everyone[setup.keeps] if new else nobody,
    )
    changed, unsaved = np.ones(len(everyone), bool), np.zeros(len(everyone), bool)
    for round in range(first + 1, training.rounds + 1):
        participants, upcoming, last = upcoming, _participants(setup, round + 1), round == training.rounds
        changed[participants] = unsaved[participants] = True
        evaluates = last or round % setup.evaluation.every == 0
        saves = last or round % setup.checkpoint.every == 0
        yield RoundSchedule(
            setup,
            round=round,
            opening=False,
            participants=participants,
            receivers=_receivers(setup, round, participants, upcoming),
            evaluates=evaluates,
            tested=_tested(setup, changed) if evaluates else nobody,
            saves=saves,
            unsaved=np.flatnonzero(unsaved & setup.keeps),
        )
        changed &= not evaluates
        unsaved &= not saves


def _participants(setup: Setup, round: int) -> np.ndarray:
    """Who trains in a round; nobody before the first and after the last."""
    if not 1 <= round <= setup.task.training.rounds:
        return np.empty(0, np.int64)
    return setup.task.training.participants(setup.task.seed, round, setup.task.num_clients)


def _receivers(setup: Setup, round: int, participants: np.ndarray, upcoming: np.ndarray) -> np.ndarray:
    """Who trains next (`upcoming`), and who is tested with a message of its own."""
    kinds = [setup.declared.down[name] for name in setup.algorithm.predicts_with]
    if not any(isinstance(kind, Own | OwnClasses) for kind in kinds):
        return upcoming
    if round == 0 or setup.evaluation.absent == "latest":
        return np.arange(setup.task.num_clients)
    return np.union1d(upcoming, participants)


def _tested(setup: Setup, changed: np.ndarray) -> np.ndarray:
    """The clients whose personal model may differ from the one tested last; `changed` [N] says whose state does."""
    by_state = not setup.algorithm.predicts_with or setup.evaluation.absent == "last_received"
    return np.flatnonzero(changed) if by_state and not setup.executor.adapts else np.arange(len(changed))
