"""The participants of a round: they train here, and those that fail anywhere count as absent."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pflmpi import tree
from pflmpi.messages.device_sum import on_host
from pflmpi.messages.downlink import Reply
from pflmpi.messages.groups import ClientGroup
from pflmpi.messages.kinds import Updates
from pflmpi.runtime import client_errors
from pflmpi.runtime.client_state import Population
from pflmpi.runtime.executors.transfers import device_message_limit, pipelined
from pflmpi.runtime.round_schedule import RoundSchedule
from pflmpi.runtime.setup import Setup
from pflmpi.transports.base import Transport

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """What the clients of this rank have come to in a round.

    Attributes:
        ups: of each group, the clients that succeeded and their messages.
        losses: mean training loss of each of them.
        failed: of the others, why; they keep their states.
    """

    ups: Updates = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


def train(setup: Setup, population: Population, reply: Reply, groups: list[ClientGroup], round: int) -> Trained:
    """Train the participants of this rank."""
    found, room = Trained(), device_message_limit(setup.executor.device)

    def begin(group: ClientGroup) -> Callable[[], client_errors.GroupUpdate]:
        states, down = population.to_train(group), {**reply.for_clients(group), **population.answers(group)}
        return client_errors.update(setup.executor, group, states, down, round, setup.skips)

    for done in pipelined(map(begin, groups), setup.executor.ahead):
        found.failed.update(done.failed)
        if len(done.clients):
            population.put(done.clients, done.states)
            room -= tree.num_bytes({**done.up})
            found.ups.append((done.clients, done.up if room > 0 else on_host(done.up)))
            found.losses.update(zip(done.clients.tolist(), done.loss.tolist(), strict=True))
    return found


def without_failed(setup: Setup, transport: Transport, now: RoundSchedule, failed: dict[int, str]) -> RoundSchedule:
    """The round without the participants that failed on any rank."""
    if not setup.skips:
        return now
    failed = client_errors.agree(transport, now.participants, failed)
    if not failed:
        return now
    for why in failed.values() if transport.rank == 0 else ():
        _log.warning("skipped: %s", why)
    client_errors.check_enough(setup, now.round, len(now.participants) - len(failed), failed)
    return now.without(np.array(list(failed), np.int64))
