"""The loop of a run, for every rank: there is no other."""

from dataclasses import replace
from functools import partial

import numpy as np

from pflmpi.learning import replay
from pflmpi.messages.downlink import Reply
from pflmpi.runtime import client_errors, report
from pflmpi.runtime.balance import client_seconds
from pflmpi.runtime.checkpoints import Checkpoints
from pflmpi.runtime.client_state import Population
from pflmpi.runtime.config import LEAST_TIMEOUT
from pflmpi.runtime.evaluation.clients import evaluate, evaluate_shared_model, evaluate_trained
from pflmpi.runtime.evaluation.measures import Counts, concatenated
from pflmpi.runtime.evaluation.unseen import evaluate_unseen
from pflmpi.runtime.exchange import exchange
from pflmpi.runtime.newcomers import mean_answers
from pflmpi.runtime.participants import Trained, train, without
from pflmpi.runtime.progress import Observer, Progress
from pflmpi.runtime.report import RoundReport
from pflmpi.runtime.round_schedule import RoundSchedule
from pflmpi.runtime.schedule import schedule
from pflmpi.runtime.setup import Setup
from pflmpi.runtime.stopping import Stop
from pflmpi.runtime.stopwatch import Stopwatch
from pflmpi.transports.base import Transport
from pflmpi.tree import Tree

_FIRST_ROUND = 3600.0  # seconds to wait for other ranks while no round has been measured
_PATIENCE = 20.0  # times the longest round, afterwards


def run(
    setup: Setup,
    transport: Transport,
    checkpoints: Checkpoints,
    server: Tree,
    population: Population,
    done: int | None,
    observe: Observer,
    stop: Stop,
) -> Tree:
    """Run the rounds after `done` to the last; return the final server state (rank 0).

    Args:
        server: the server's state after round `done`; rank 0 only, `{}` elsewhere.
        population: the clients that live here, after round `done`; changed in place.
        done: None for a new run.
        observe: called on rank 0 after every round.
        stop: whether this rank has a reason to stop.

    Raises:
        Stopped: on all ranks, when one of them has a reason to stop; the last round is complete and on disk.
    """
    replay.forget()
    rank, between_reports = transport.rank, Stopwatch()
    scores = Counts.none(setup.executor.federation.test_class_counts)
    _limit_waiting(setup, transport, None)
    rounds, pace, seconds_of = schedule(setup, done), setup.placement.pace, setup.seconds
    server, reply = _open(setup, transport, checkpoints, next(rounds), server, population)
    for now in rounds:
        watch, now = Stopwatch(), replace(now, pace=pace)
        mine = train(setup, population, reply, now.training[rank], now.round)
        training = watch.lap()
        if setup.skips:
            now = without(setup, transport, now, mine.failed)
        trained = (
            evaluate_trained(setup.executor, population, reply, mine.ups, now.round) if now.tests_trained else None
        )
        testing = watch.lap()
        say = partial(_report, setup, transport, now, mine, training, stop, watch)
        reported = None if now.evaluates else say(_nobody(setup), testing)  # travels right before the messages

        seen, reply = exchange(setup, transport, server, population, mine.ups, now)
        server = seen.server
        population.keep_reply(now.training[rank], reply)
        reply = reply.on(setup.executor.device)
        exchanging = watch.lap()

        if now.evaluates:
            right = _tested(setup, transport, population, server, reply, now)
            reported = say(concatenated([right, trained]) if trained else right, testing + watch.lap())
        progress = None
        if reported is not None:
            scores = scores.updated(now.tested, reported.tested) if now.evaluates else scores
            if now.round > (done or 0) + 1:  # the first round of a process warms up
                seconds_of = client_seconds.measured(seconds_of, now.participants, reported.train_seconds)
            seconds = {
                "compute": reported.busiest,
                "exchange": exchanging,
                "waiting": reported.waiting,
                "evaluation": reported.testing,
                "checkpoint": checkpoints.take_seconds(),
                "round": between_reports.lap(),
            }
            who, tested = (now.round, now.participants, now.skipped), scores if now.evaluates else None
            others = (reported.unseen, reported.trained, reported.train_loss)
            moved = _moved(transport, now)
            progress = Progress(*who, tested, seconds, moved, reported.memory, *others, client_seconds=seconds_of)
            checkpoints.record(progress)
            observe(progress)
            stop.early.add(progress.columns)
        told = np.zeros(now.num_told)
        if now.tells and rank == 0:
            told += client_seconds.pace(seconds_of, setup.placement.work)
        asked = stop.agree(transport, watch.seconds, None if reported is None else reported.stop, told)
        pace = told if told.any() else pace
        _limit_waiting(setup, transport, stop.longest)
        if now.saves or asked:
            checkpoints.save(now, seen, population, progress)
        if asked == "end":
            break
        if asked and now.round < setup.task.training.rounds:
            checkpoints.finish(transport)
            raise stop.interruption(now.round)
    checkpoints.finish(transport)
    return server


def _open(
    setup: Setup,
    transport: Transport,
    checkpoints: Checkpoints,
    opening: RoundSchedule,
    server: Tree,
    population: Population,
) -> tuple[Tree, Reply]:
    """Let the clients of a new run introduce themselves; send the reply that the first round trains with."""
    introducing = opening.training[transport.rank]
    ups = [(group, client_errors.introduce(setup.executor, group, population.get(group))) for group in introducing]
    seen, reply = exchange(setup, transport, server, population, ups, opening)
    if opening.saves:
        population.keep_reply(setup.placement.assign(np.arange(setup.task.num_clients))[transport.rank], reply)
        checkpoints.save(opening, seen, population, None)
    return seen.server, reply.on(setup.executor.device)


def _tested(
    setup: Setup, transport: Transport, population: Population, server: Tree, reply: Reply, now: RoundSchedule
) -> Counts:
    """What the clients that are tested here get right, and after them the unseen ones."""
    mine = now.testing[transport.rank]
    if setup.shares_model:
        right = evaluate_shared_model(setup.executor, reply, mine, now.round)
    else:
        right = evaluate(setup.executor, population, reply, mine, now.round)
    if not now.unseen:
        return right
    shared = {**reply.shared, **mean_answers(setup, transport, population)}
    new = evaluate_unseen(now.unseen, transport, server, shared, population.kept, now.round)
    return concatenated([right, new])


def _nobody(setup: Setup) -> Counts:
    """What nobody gets right."""
    return Counts.none(setup.executor.federation.test_class_counts[:0])


def _report(
    setup: Setup,
    transport: Transport,
    now: RoundSchedule,
    mine: Trained,
    training: float,
    stop: Stop,
    watch: Stopwatch,
    right: Counts,
    testing: float,
) -> RoundReport | None:
    """Report what was measured here; on rank 0 what all ranks have reported."""
    stop.round_took(watch.seconds)
    found = report.Measured(right, mine.losses, mine.seconds, training, testing, stop.said)
    return report.gather(transport, *now.reported, setup.task.num_clients, found)


def _limit_waiting(setup: Setup, transport: Transport, longest: float | None) -> None:
    """Set how long a call waits for other ranks, from the seconds of the longest round; None before the first."""
    if setup.timeout is None:
        transport.timeout = _FIRST_ROUND if longest is None else max(LEAST_TIMEOUT, _PATIENCE * longest)


def _moved(transport: Transport, now: RoundSchedule) -> dict[str, np.ndarray]:
    """The bytes of a round: logical ones by client, and those that ranks have sent each other since the last one."""
    wire_down, wire_up = map(np.array, transport.counter.take("data"))
    return {"up": now.up_bytes, "down": now.down_bytes, "wire_up": wire_up, "wire_down": wire_down}
