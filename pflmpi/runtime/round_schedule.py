"""The rounds of a run before they happen: who trains and is tested where, what is saved, which calls are made.

A pure function of the setup and of the configuration. The loop, the checkpoints and `plan` read it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

import numpy as np

from pflmpi.messages.downlink import answer_calls, down_calls
from pflmpi.messages.groups import ClientGroup
from pflmpi.messages.kinds import Own, OwnClasses
from pflmpi.messages.traffic import Traffic
from pflmpi.messages.uplink import up_calls
from pflmpi.runtime.config import CheckpointConfig, EvaluationConfig
from pflmpi.runtime.setup import Setup
from pflmpi.runtime.unseen import Unseen


@dataclass(frozen=True)
class RoundSchedule:
    """One round, or the opening of a run: what is exchanged before its first round.

    Attributes:
        round: counts from 1; the opening has the number of the last round that is done.
        opening: whether it is the opening. Nobody trains in it; the participants introduce themselves.
        participants: [P] ascending ids.
        skipped: ascending ids of participants that failed, which a run learns in the round; not among `participants`.
        receivers: [R] ascending ids of the clients that the reply is for: who trains next, and who is tested with it.
        evaluates: whether personal models are tested.
        tests_trained: whether the participants are tested after local training too, before the server answers.
        tested: [T] ascending ids, those whose personal model may have changed since the last evaluation.
        saves: whether a checkpoint follows.
        unsaved: [U] ascending ids of the clients that keep state which has changed since the last checkpoint.
    """

    setup: Setup
    round: int
    opening: bool
    participants: np.ndarray
    receivers: np.ndarray
    evaluates: bool
    tests_trained: bool
    tested: np.ndarray
    saves: bool
    unsaved: np.ndarray
    skipped: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def without(self, failed: np.ndarray) -> "RoundSchedule":
        """The round after participants have failed in it, ascending; they count as absent."""
        return replace(self, participants=np.setdiff1d(self.participants, failed), skipped=failed)

    @cached_property
    def training(self) -> list[list[ClientGroup]]:
        """The groups of participants of each rank."""
        drawn = self.setup.placement.assign(np.union1d(self.participants, self.skipped))
        if not len(self.skipped):
            return drawn
        left = [[group[~np.isin(group, self.skipped)] for group in groups] for groups in drawn]
        return [[group for group in groups if len(group)] for groups in left]

    @cached_property
    def receiving(self) -> list[list[ClientGroup]]:
        """The groups of receivers of each rank."""
        return self.setup.placement.assign(self.receivers)

    @cached_property
    def testing(self) -> list[list[ClientGroup]]:
        return self.setup.placement.assign(self.tested, tested=True)

    @property
    def unseen(self) -> Unseen | None:
        """The unseen clients, if they are tested in this round."""
        return self.setup.unseen if self.evaluates else None

    @cached_property
    def reporting(self) -> list[list[ClientGroup]]:
        """The groups whose scores each rank reports: the tested ones, then the unseen clients, then the trained ones.

        The numbers of those that are tested after training begin after all clients; after twice as many, those of the
        tested ones begin again, with their validation samples.
        """
        no_groups: list[list[ClientGroup]] = [[] for _ in self.testing]
        unseen = self.unseen.groups if self.unseen else no_groups
        after = len(self.test_class_counts)
        trained = [[after + group for group in groups] for groups in self.training] if self.tests_trained else no_groups
        validated = no_groups
        if self.setup.validation is not None:
            validated = [[2 * after + group for group in groups] for groups in self.testing]
        return [list(chain(*groups)) for groups in zip(self.testing, unseen, trained, validated, strict=True)]

    @property
    def test_class_counts(self) -> np.ndarray:
        """[N, K] test samples of each class; of unseen clients too, if these are tested."""
        executor = self.unseen.executor if self.unseen else self.setup.executor
        return executor.federation.test_class_counts

    @cached_property
    def rows(self) -> list[np.ndarray]:
        """The clients whose state each rank writes in a checkpoint after this round."""
        return self.setup.placement.at_home(self.unsaved)

    @property
    def simulated_seconds(self) -> float | None:
        """Seconds of the round on the simulated clients; None if not configured."""
        return self.setup.executor.simulated_seconds(self.participants, self.round)

    @property
    def up_bytes(self) -> np.ndarray:
        """[N] logical bytes that each client sends; an introduction belongs to round 1."""
        return self._bytes(sent=True)

    @property
    def down_bytes(self) -> np.ndarray:
        """[N] logical bytes that each participant receives."""
        return self._bytes(sent=False)

    @cached_property
    def uplink(self) -> list[Traffic]:
        """The calls by which the participants' messages reach the server."""
        return up_calls(self.setup.declared, self.training) if len(self.participants) else []

    @cached_property
    def downlink(self) -> list[Traffic]:
        """The calls by which answers reach the participants, and the reply its receivers."""
        declared, home = self.setup.declared, self.setup.placement.home
        return [*answer_calls(declared, self.training), *down_calls(declared, self.receiving, home)]

    @property
    def calls(self) -> list[Traffic]:
        """The calls that move messages, those to unseen clients among them."""
        return [*self.uplink, *self.downlink, *(self.unseen.calls if self.unseen else ())]

    def _bytes(self, sent: bool) -> np.ndarray:
        declared, n = self.setup.declared, self.setup.task.num_clients
        num_bytes = np.zeros(n, np.int64)
        if not self.opening:
            of = declared.up_bytes if sent else declared.down_bytes
            num_bytes[self.participants] = of(self.participants)
            if sent and self.round == 1 and self.setup.algorithm.introduces:
                everyone = _find_introducing(self.setup)
                num_bytes[everyone] += declared.up_bytes(everyone)
        return num_bytes


def schedule(
    setup: Setup, evaluation: EvaluationConfig, checkpoint: CheckpointConfig, done: int | None
) -> Iterator[RoundSchedule]:
    """The opening, then every round to the last.

    Args:
        done: the round to continue after; None for a new run.
    """
    rounds, first = setup.task.training.rounds, done or 0
    upcoming = _find_participants(setup, first + 1)
    yield _schedule_opening(setup, evaluation, first, upcoming, new=done is None)
    changed, unsaved = np.ones(setup.task.num_clients, bool), np.zeros(setup.task.num_clients, bool)
    for round in range(first + 1, rounds + 1):
        participants, upcoming = upcoming, _find_participants(setup, round + 1)
        changed[participants] = unsaved[participants] = True
        evaluates = round == rounds or round % evaluation.every == 0
        saves = round == rounds or round % checkpoint.every == 0
        yield RoundSchedule(
            setup,
            round=round,
            opening=False,
            participants=participants,
            receivers=_find_receivers(setup, evaluation, round, participants, upcoming),
            evaluates=evaluates,
            tests_trained=evaluates and evaluation.when == "both",
            tested=_find_tested(setup, evaluation, changed) if evaluates else _NO_CLIENTS,
            saves=saves,
            unsaved=np.flatnonzero(unsaved & setup.keeps_state),
        )
        changed &= not evaluates
        unsaved &= not saves


_NO_CLIENTS = np.empty(0, np.int64)


def _schedule_opening(
    setup: Setup, evaluation: EvaluationConfig, round: int, upcoming: np.ndarray, new: bool
) -> RoundSchedule:
    """The exchange before the first round of a new run, or before the next one of a run resumed after `round`."""
    before = _find_participants(setup, round)
    return RoundSchedule(
        setup,
        round=round,
        opening=True,
        participants=_find_introducing(setup) if new and setup.algorithm.introduces else _NO_CLIENTS,
        receivers=_find_receivers(setup, evaluation, round, before, upcoming),
        evaluates=False,
        tests_trained=False,
        tested=_NO_CLIENTS,
        saves=new,
        unsaved=np.flatnonzero(setup.keeps_state) if new else _NO_CLIENTS,
    )


def _find_introducing(setup: Setup) -> np.ndarray:
    """Ascending ids of the clients that introduce themselves to an algorithm that asks for it."""
    return np.setdiff1d(np.arange(setup.task.num_clients), setup.task.training.without_clients).astype(np.int64)


def _find_participants(setup: Setup, round: int) -> np.ndarray:
    """Ascending ids of the clients that train in a round; none before the first and after the last."""
    return setup.executor.participation.participants(round) if 1 <= round <= setup.task.training.rounds else _NO_CLIENTS


def _find_receivers(
    setup: Setup, evaluation: EvaluationConfig, round: int, participants: np.ndarray, upcoming: np.ndarray
) -> np.ndarray:
    """The clients that train next (`upcoming`), and those that are tested with a message of their own."""
    kinds = [setup.declared.down[name] for name in setup.algorithm.predicts_with]
    if not any(isinstance(kind, Own | OwnClasses) for kind in kinds):
        return upcoming
    if round == 0 or evaluation.absent == "latest":
        return np.arange(setup.task.num_clients)
    return np.union1d(upcoming, participants)


def _find_tested(setup: Setup, evaluation: EvaluationConfig, changed: np.ndarray) -> np.ndarray:
    """The clients whose personal model may differ from the one tested last; `changed` [N] says whose state does."""
    by_state = not setup.algorithm.predicts_with or evaluation.absent == "last_received"
    return np.flatnonzero(changed) if by_state and not setup.executor.adapts else np.arange(len(changed))


_FEW = 4  # ranks of which it does not matter


def advise_fewer_ranks(setup: Setup, rounds: Sequence[RoundSchedule]) -> str:
    """Advice if half of the ranks that compute have no client to train in any of these rounds; else ""."""
    ranks = len(setup.placement.computing_ranks)
    busy = [sum(map(bool, scheduled.training)) for scheduled in rounds]
    if ranks < _FEW or not busy or 2 * max(busy) > ranks:
        return ""
    participants = max(len(scheduled.participants) for scheduled in rounds)
    lanes = min(max(map(len, setup.placement.groups)), setup.placement.most)
    calls = f" in calls of up to {lanes}" if lanes > 1 else ""
    lower = ", or set runtime.lanes lower" if lanes > 1 else ""
    return (
        f"{ranks} ranks compute clients, at most {max(busy)} of them at a time ({participants} participants{calls}); "
        f"fewer ranks would be as quick{lower}"
    )
