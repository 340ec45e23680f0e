"""The training loop, run by every rank."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from pflmpi import tree
from pflmpi.learning import replay
from pflmpi.messages.device_sum import messages_to_host
from pflmpi.messages.downlink import Reply
from pflmpi.messages.groups import ClientGroup
from pflmpi.messages.kinds import Updates
from pflmpi.messages.uplink_transforms import RESIDUAL, transform
from pflmpi.runtime import client_errors
from pflmpi.runtime.checkpoints import Checkpoints
from pflmpi.runtime.client_state import Population
from pflmpi.runtime.counts import Counts, concatenate
from pflmpi.runtime.evaluation import evaluate, evaluate_shared_model, evaluate_trained
from pflmpi.runtime.exchange import exchange
from pflmpi.runtime.executors.base import Executor
from pflmpi.runtime.executors.transfers import device_message_limit, run_pipelined
from pflmpi.runtime.round_report import RoundHooks, Stopwatch
from pflmpi.runtime.round_schedule import RoundSchedule
from pflmpi.runtime.setup import Setup
from pflmpi.runtime.unseen import evaluate_unseen, mean_answers
from pflmpi.transports.base import Transport
from pflmpi.tree import Tree

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """Results of this rank's participants."""

    ups: Updates = field(default_factory=list)  # by group, the clients that succeeded and their messages
    losses: dict[int, float] = field(default_factory=dict)  # their mean training loss
    failed: dict[int, str] = field(default_factory=dict)  # why, by client that failed and so keeps its old state


def run(
    setup: Setup,
    transport: Transport,
    rounds: Iterator[RoundSchedule],
    hooks: RoundHooks,
    checkpoints: Checkpoints,
    server: Tree,
    population: Population,
    skips: bool,
) -> Tree:
    """Run the scheduled rounds; return the final server state (rank 0).

    Args:
        rounds: the opening, and the rounds that are left.
        server: the server's state before them; rank 0 only, `{}` elsewhere.
        population: the clients that live here; changed in place.
        skips: go on without the clients that fail in a round.

    Raises:
        Stopped: on all ranks, if one of them has a reason to stop; the last round is complete and on disk.
    """
    replay.clear_traces()
    rank, last = transport.rank, setup.task.training.rounds
    server, reply = _open_run(setup, transport, checkpoints, next(rounds), server, population)
    for now in rounds:
        watch = Stopwatch()
        trained = train(setup.executor, population, reply, now.training[rank], now.round, skips)
        watch.lap("training")
        if skips:
            now = drop_failed(setup, transport, now, trained.failed)
        after_training = []
        if now.tests_trained:  # before the server's answers change the clients' models
            after_training = [evaluate_trained(setup.executor, population, reply, trained.ups, now.round)]
        watch.lap("testing")

        # transform, aggregate, server_update, publish
        transform_messages(setup, population, reply, trained.ups, now.round)
        server_round, reply = exchange(setup, transport, server, population, trained.ups, now)
        server = server_round.server
        population.keep_reply(now.training[rank], reply)
        reply = reply.on(setup.executor.device)
        watch.lap("exchange")

        counts = _evaluate(setup, transport, population, server, reply, now) + after_training
        if setup.validation and now.evaluates:
            counts.append(_test(setup, setup.validation, population, reply, now.testing[rank], now.round))
        watch.lap("testing")

        progress, pause = hooks.end_round(now, concatenate(counts), trained.losses, watch)
        if now.saves or pause:
            checkpoints.save(now, server_round, population, progress)
        if pause == "end" or now.round == last:
            break
        if pause:
            checkpoints.finish()
            raise hooks.stop.interruption(now.round)
    checkpoints.finish()
    return server


def _open_run(
    setup: Setup,
    transport: Transport,
    checkpoints: Checkpoints,
    opening: RoundSchedule,
    server: Tree,
    population: Population,
) -> tuple[Tree, Reply]:
    """Exchange the introductions of a new run's clients, and send the reply that the next round trains with."""
    ups = [
        (group, client_errors.introduce_group(setup.executor, group, population.get(group)))
        for group in opening.training[transport.rank]
    ]
    transform_messages(setup, population, Reply(), ups, opening.round)
    server_round, reply = exchange(setup, transport, server, population, ups, opening)
    if opening.saves:
        population.keep_reply(setup.placement.assign(np.arange(setup.task.num_clients))[transport.rank], reply)
        checkpoints.save(opening, server_round, population, None)
    return server_round.server, reply.on(setup.executor.device)


def train(
    executor: Executor, population: Population, reply: Reply, groups: list[ClientGroup], round: int, skips: bool = False
) -> Trained:
    """Train this rank's participants; with `skips`, failing ones are in `Trained.failed`, else the first one raises."""
    trained, free_bytes = Trained(), device_message_limit(executor.device)

    def begin(group: ClientGroup) -> Callable[[], client_errors.GroupUpdate]:
        states, down = population.to_train(group), {**reply.for_clients(group), **population.answers(group)}
        return client_errors.update_group(executor, group, states, down, round, skips)

    for update in run_pipelined(map(begin, groups), executor.ahead):
        trained.failed.update(update.failed)
        if len(update.clients):
            population.put(update.clients, update.states)
            free_bytes -= tree.num_bytes({**update.up})
            trained.ups.append((update.clients, update.up if free_bytes > 0 else messages_to_host(update.up)))
            trained.losses.update(zip(update.clients.tolist(), update.loss.tolist(), strict=True))
    return trained


def transform_messages(setup: Setup, population: Population, reply: Reply, ups: Updates, round: int) -> None:
    """Apply the transforms of the configuration's `uplink` to the messages of this rank's participants, in place.

    Args:
        reply: the messages that they trained with.
    """
    declared, seed = setup.declared, setup.task.seed
    for number, (clients, messages) in enumerate(ups) if declared.transforms.chosen else ():
        declared.check_up(messages, len(clients))
        received = {**reply.for_clients(clients), **population.answers(clients)}
        residual = population.leaf(RESIDUAL, clients) if declared.transforms.top_k is not None else None
        transformed, residual = transform(
            declared.transforms, declared.up, seed, round, clients, messages, received, residual
        )
        ups[number] = clients, transformed
        if residual is not None:
            population.put(clients, {RESIDUAL: residual})


def drop_failed(setup: Setup, transport: Transport, now: RoundSchedule, failed: dict[int, str]) -> RoundSchedule:
    """Returns the round without the participants that failed on any rank."""
    failed = client_errors.agree_on_failed(transport, now.participants, failed)
    if not failed:
        return now
    for why in failed.values() if transport.rank == 0 else ():
        _log.warning("skipped: %s", why)
    client_errors.check_enough_left(setup.algorithm, setup.task, now.round, len(now.participants) - len(failed), failed)
    return now.without(np.array(list(failed), np.int64))


def _evaluate(
    setup: Setup, transport: Transport, population: Population, server: Tree, reply: Reply, now: RoundSchedule
) -> list[Counts]:
    """Test this rank's clients whose models may have changed, and unseen ones; none in rounds without evaluation."""
    groups = now.testing[transport.rank]
    if not now.evaluates:
        return [setup.executor.untested([])]
    counts = _test(setup, setup.executor, population, reply, groups, now.round)
    if not now.unseen:
        return [counts]
    shared = {**reply.shared, **mean_answers(now.unseen, transport, population)}
    return [counts, evaluate_unseen(now.unseen, transport, server, shared, population.kept, now.round)]


def _test(
    setup: Setup, executor: Executor, population: Population, reply: Reply, groups: list[ClientGroup], round: int
) -> Counts:
    """Test clients of this rank on the test samples of the executor's federation."""
    if setup.shares_model:
        return evaluate_shared_model(executor, reply, groups, round)
    return evaluate(executor, population, reply, groups, round)
