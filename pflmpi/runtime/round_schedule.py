"""The rounds of a run before they happen: who trains and is tested where, what is saved, which calls are made.

A pure function of the setup. The loop, the checkpoints and `plan` read it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from pflmpi.messages.downlink import answer_calls, down_calls
from pflmpi.messages.groups import ClientGroup
from pflmpi.messages.kinds import Own, OwnClasses
from pflmpi.messages.traffic import Traffic
from pflmpi.messages.uplink import up_calls
from pflmpi.runtime.setup import Setup
from pflmpi.runtime.unseen import Unseen


@dataclass(frozen=True)
class RoundSchedule:
    """One round, or the opening of a run: what is exchanged before its first round.

    Attributes:
        setup: what it follows from.
        round: counts from 1; the opening has the number of the last round that is done.
        opening: whether it is the opening. Nobody trains in it; the participants introduce themselves.
        participants: [P] ascending ids.
        skipped: ascending ids of participants that failed, which a run learns in the round; not among `participants`.
        receivers: [R] ascending ids of the clients that the reply is for: who trains next, and who is tested with it.
        evaluates: whether personal models are tested.
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
        """The groups that each rank tests."""
        return self.setup.placement.assign(self.tested, tested=True)

    @property
    def tests_trained(self) -> bool:
        """Whether the participants are tested after local training too, before the server answers."""
        return self.evaluates and self.setup.evaluation.when == "both"

    @property
    def unseen(self) -> Unseen | None:
        """The unseen clients, if they are tested in this round."""
        return self.setup.unseen if self.evaluates else None

    @cached_property
    def reporting(self) -> list[list[ClientGroup]]:
        """The groups whose scores each rank reports: those that it tests, those of unseen clients, and those that it
        has tested after training, whose numbers go on after all clients."""
        nobody: list[list[ClientGroup]] = [[] for _ in self.testing]
        unseen = self.unseen.groups if self.unseen else nobody
        after = len(self._test_class_counts)
        trained = [[after + group for group in groups] for groups in self.training] if self.tests_trained else nobody
        return [[*each, *new, *late] for each, new, late in zip(self.testing, unseen, trained, strict=True)]

    @property
    def reported(self) -> tuple[list[list[ClientGroup]], list[list[ClientGroup]], np.ndarray]:
        """The groups of each rank whose scores, and whose training losses, are reported; test samples by class."""
        return self.reporting, self.training, self._test_class_counts

    @property
    def _test_class_counts(self) -> np.ndarray:
        executor = self.unseen.executor if self.unseen else self.setup.executor
        return executor.federation.test_class_counts

    @cached_property
    def rows(self) -> list[np.ndarray]:
        """The clients whose state each rank writes in a checkpoint after this round."""
        return self.setup.placement.at_home(self.unsaved)

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
                num_bytes += declared.up_bytes(np.arange(n))
        return num_bytes


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


_FEW = 4  # ranks of which it does not matter


def advise_fewer_ranks(setup: Setup, rounds: Sequence[RoundSchedule]) -> str:
    """What to change if half of the ranks that compute have no client to train in any of these rounds; else ""."""
    hosts = len(setup.placement.hosts)
    busy = [sum(map(bool, one.training)) for one in rounds]
    if hosts < _FEW or not busy or 2 * max(busy) > hosts:
        return ""
    participants = max(len(one.participants) for one in rounds)
    lanes = min(max(map(len, setup.placement.groups)), setup.placement.most)
    calls = f" in calls of up to {lanes}" if lanes > 1 else ""
    lower = ", or set runtime.lanes lower" if lanes > 1 else ""
    return (
        f"{hosts} ranks compute clients, at most {max(busy)} of them at a time ({participants} participants{calls}); "
        f"fewer ranks would be as quick{lower}"
    )
