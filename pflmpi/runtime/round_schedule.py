"""The schedule of a run's rounds: which clients train and are tested where, what is saved, which calls are made.

It is a pure function of the setup and the configuration, used by the training loop, checkpoints and `plan`.
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

_NO_CLIENTS = np.empty(0, np.int64)
_FEW_RANKS = 4  # below this no advice is given to use fewer ranks


@dataclass(frozen=True)
class RoundSchedule:
    """One round, or the opening of a run, which is the exchange before its first round.

    Attributes:
        round: counts from 1; the opening has the number of the last completed round.
        opening: whether it is the opening, in which no client trains and the participants introduce themselves.
        participants: [P] ascending ids.
        skipped: ascending ids of participants that failed; not among `participants`. Only known during the round.
        receivers: [R] ascending ids of the clients that receive the reply, to train or to be tested with it.
        evaluates: whether personal models are tested.
        tests_trained: whether participants are also tested after local training, before the server answers.
        tested: [T] ascending ids of the clients whose personal model may have changed since the last evaluation.
        saves: whether a checkpoint is written.
        unsaved: [U] ascending ids of the clients whose state has changed since the last checkpoint.
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
        """The round without participants that failed in it (ascending ids); they count as absent."""
        return replace(self, participants=np.setdiff1d(self.participants, failed), skipped=failed)

    @cached_property
    def training(self) -> list[list[ClientGroup]]:
        """The groups of participants of each rank."""
        assigned = self.setup.placement.assign(np.union1d(self.participants, self.skipped))
        if not len(self.skipped):
            return assigned
        remaining = [[group[~np.isin(group, self.skipped)] for group in groups] for groups in assigned]
        return [[group for group in groups if len(group)] for groups in remaining]

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
        """The groups whose results each rank reports, in the order: tested, unseen, trained, validated.

        Results are numbered: N clients with unseen ones have the numbers 0 to N - 1 in tests, N to 2 N - 1 in tests
        after local training, and from 2 N on in tests on validation samples.
        """
        no_groups: list[list[ClientGroup]] = [[] for _ in self.testing]
        unseen = self.unseen.groups if self.unseen else no_groups
        n = len(self.test_class_counts)
        trained = [[n + group for group in groups] for groups in self.training] if self.tests_trained else no_groups
        validated = no_groups
        if self.setup.validation is not None:
            validated = [[2 * n + group for group in groups] for groups in self.testing]
        return [list(chain(*groups)) for groups in zip(self.testing, unseen, trained, validated, strict=True)]

    @property
    def test_class_counts(self) -> np.ndarray:
        """[N, K] test samples of each class, with rows for unseen clients if these are tested."""
        executor = self.unseen.executor if self.unseen else self.setup.executor
        return executor.federation.test_class_counts

    @cached_property
    def rows(self) -> list[np.ndarray]:
        """By rank, the clients whose changed state is there when a checkpoint is written after this round."""
        return self.setup.placement.at_home(self.unsaved)

    @property
    def simulated_seconds(self) -> float | None:
        """Seconds of the round on the simulated clients; None if not configured."""
        return self.setup.executor.simulated_seconds(self.participants, self.round)

    @property
    def up_bytes(self) -> np.ndarray:
        """[N] logical bytes that each client sends; introductions count in round 1."""
        return self._bytes(sent=True)

    @property
    def down_bytes(self) -> np.ndarray:
        """[N] logical bytes that each participant receives."""
        return self._bytes(sent=False)

    @cached_property
    def uplink(self) -> list[Traffic]:
        """The collective calls for the participants' messages up."""
        return up_calls(self.setup.declared, self.training) if len(self.participants) else []

    @cached_property
    def downlink(self) -> list[Traffic]:
        """The collective calls for the answers and the reply."""
        declared, home = self.setup.declared, self.setup.placement.home
        return [*answer_calls(declared, self.training), *down_calls(declared, self.receiving, home)]

    @property
    def calls(self) -> list[Traffic]:
        """All collective calls for messages, including those to unseen clients."""
        return [*self.uplink, *self.downlink, *(self.unseen.calls if self.unseen else ())]

    def _bytes(self, sent: bool) -> np.ndarray:
        declared, n = self.setup.declared, self.setup.task.num_clients
        num_bytes = np.zeros(n, np.int64)
        if not self.opening:
            count_bytes = declared.up_bytes if sent else declared.down_bytes
            num_bytes[self.participants] = count_bytes(self.participants)
            if sent and self.round == 1 and self.setup.algorithm.introduces:
                introducing = _find_introducing(self.setup)
                num_bytes[introducing] += declared.up_bytes(introducing)
        return num_bytes


def schedule(
    setup: Setup, evaluation: EvaluationConfig, checkpoint: CheckpointConfig, done: int | None
) -> Iterator[RoundSchedule]:
    """Yields the opening, then all rounds up to the last.

    Args:
        done: the last completed round of a resumed run; None for a new run.
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
    """Returns the ascending ids of the clients that introduce themselves, if the algorithm has introductions."""
    return np.setdiff1d(np.arange(setup.task.num_clients), setup.task.training.without_clients).astype(np.int64)


def _find_participants(setup: Setup, round: int) -> np.ndarray:
    """Returns the ascending ids of the clients that train in a round; empty before the first and after the last."""
    return setup.executor.participation.participants(round) if 1 <= round <= setup.task.training.rounds else _NO_CLIENTS


def _find_receivers(
    setup: Setup, evaluation: EvaluationConfig, round: int, participants: np.ndarray, upcoming: np.ndarray
) -> np.ndarray:
    """Returns the clients that train next (`upcoming`), and those that are tested with a message of their own."""
    kinds = [setup.declared.down[name] for name in setup.algorithm.predicts_with]
    if not any(isinstance(kind, Own | OwnClasses) for kind in kinds):
        return upcoming
    if round == 0 or evaluation.absent == "latest":
        return np.arange(setup.task.num_clients)
    return np.union1d(upcoming, participants)


def _find_tested(setup: Setup, evaluation: EvaluationConfig, changed: np.ndarray) -> np.ndarray:
    """Returns the clients whose personal model may have changed since it was tested last.

    Args:
        changed: [N] bool, whether the client's state has changed since then.
    """
    by_state = not setup.algorithm.predicts_with or evaluation.absent == "last_received"
    return np.flatnonzero(changed) if by_state and not setup.executor.adapts else np.arange(len(changed))


def advise_fewer_ranks(setup: Setup, rounds: Sequence[RoundSchedule]) -> str:
    """Returns advice if half of the computing ranks never have a client to train in these rounds; else ""."""
    ranks = len(setup.placement.computing_ranks)
    busy = [sum(map(bool, scheduled.training)) for scheduled in rounds]
    if ranks < _FEW_RANKS or not busy or 2 * max(busy) > ranks:
        return ""
    participants = max(len(scheduled.participants) for scheduled in rounds)
    lanes = min(max(map(len, setup.placement.groups)), setup.placement.max_clients)
    calls = f" in calls of up to {lanes}" if lanes > 1 else ""
    lower = ", or set runtime.lanes lower" if lanes > 1 else ""
    return (
        f"{ranks} ranks compute clients, at most {max(busy)} of them at a time ({participants} participants{calls}); "
        f"fewer ranks would be as quick{lower}"
    )
