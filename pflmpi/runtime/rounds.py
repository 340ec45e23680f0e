"""The loop of a run, for every rank: there is no other."""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from pflmpi.algorithms.base import Round
from pflmpi.errors import Stopped
from pflmpi.messages.downlink import Reply, send_down
from pflmpi.messages.groups import ClientGroup
from pflmpi.messages.kinds import Messages
from pflmpi.messages.uplink import send_up
from pflmpi.runtime import report
from pflmpi.runtime.checkpoints import Checkpoints, ServerRound
from pflmpi.runtime.client_state import Population
from pflmpi.runtime.config import LEAST_TIMEOUT
from pflmpi.runtime.contract import calling, check_state
from pflmpi.runtime.evaluation import Scores, evaluate
from pflmpi.runtime.progress import Observer, Progress
from pflmpi.runtime.schedule import RoundSchedule, schedule
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
    rank, since_report = transport.rank, Stopwatch()
    correct = np.zeros(setup.task.num_clients, np.int64)
    if setup.timeout is None:
        transport.timeout = _FIRST_ROUND
    rounds = schedule(setup, done)
    server, reply = _open(setup, transport, checkpoints, next(rounds), server, population)
    for now in rounds:
        watch = Stopwatch()

        ups = _train(setup, population, reply, now.training[rank], now.round)
        watch.lap("training")

        up = send_up(transport, setup.declared, ups, now.training, now.round)
        del ups  # memory
        measured = _diagnose(setup, server, up, now)
        server = _update_server(setup, server, up, now)
        del up  # memory
        published = _publish(setup, transport, server, now)
        reply = send_down(transport, setup.declared, published, now.receiving)
        for group in now.training[rank]:
            population.keep_reply(group, reply)
        watch.lap("exchange")

        right = evaluate(setup.executor, population, reply, now.testing[rank], now.round)
        watch.lap("evaluation")

        busy = watch.laps["training"] + watch.laps["evaluation"]
        found = report.gather(transport, now.testing, right, busy, checkpoints.shards_done)
        progress = None
        if found is not None:
            correct[now.tested] = found.correct
            scores = Scores(correct.copy(), setup.num_test) if now.evaluates else None
            seconds = {
                "compute": found.busiest,
                "exchange": watch.laps["exchange"],
                "evaluation": watch.laps["evaluation"],
                "checkpoint": checkpoints.take_seconds(),
                "round": since_report.seconds,
            }
            since_report = Stopwatch()
            progress = Progress(now.round, now.participants, scores, seconds, _moved(transport, now))
            checkpoints.record(progress, found.shards_done)
            observe(progress)
        stopping = stop.agree(transport, watch.seconds) and now.round < setup.task.training.rounds
        if setup.timeout is None:
            transport.timeout = max(LEAST_TIMEOUT, _PATIENCE * stop.longest)
        if now.saves or stopping:
            checkpoints.save(now, ServerRound(server, published, measured, progress), population)
        if stopping:
            checkpoints.finish(transport)
            raise Stopped(f"{stop.reason or 'another rank was asked to stop'}: stopped after round {now.round}")
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
    if len(opening.participants):
        ups = [
            (group, setup.executor.introduce(group, population.get(group)))
            for group in opening.training[transport.rank]
        ]
        server = _update_server(setup, server, send_up(transport, setup.declared, ups, opening.training, 0), opening)
    published = _publish(setup, transport, server, opening)
    reply = send_down(transport, setup.declared, published, opening.receiving)
    if opening.saves:
        for group in setup.placement.assign(np.arange(setup.task.num_clients))[transport.rank]:
            population.keep_reply(group, reply)
        checkpoints.save(opening, ServerRound(server, published), population)
    return server, reply


def _train(
    setup: Setup, population: Population, reply: Reply, groups: list[ClientGroup], round: int
) -> list[tuple[ClientGroup, Messages]]:
    ups = []
    for group in groups:
        states, up = setup.executor.update(group, population.get(group), reply.for_clients(group), round)
        population.put(group, states)
        ups.append((group, up))
    return ups


def _update_server(setup: Setup, server: Tree, up: Messages | None, now: RoundSchedule) -> Tree:
    if up is None:
        return server
    with calling(setup.algorithm, "server_update", now.round):
        new = setup.algorithm.server_update(setup.task, server, up, _seen_by_server(setup, now))
    check_state(setup.algorithm, "server_update", new, server)
    return new


def _diagnose(setup: Setup, server: Tree, up: Messages | None, now: RoundSchedule) -> Mapping[str, Tensor]:
    """What the algorithm measures in a round with a checkpoint; rank 0 only."""
    if up is None or not now.saves:
        return {}
    with calling(setup.algorithm, "diagnose", now.round):
        return setup.algorithm.diagnose(setup.task, server, up, _seen_by_server(setup, now))


def _publish(setup: Setup, transport: Transport, server: Tree, now: RoundSchedule) -> Messages | None:
    """What the clients receive; None but on rank 0."""
    if transport.rank != 0:
        return None
    with calling(setup.algorithm, "publish", now.round):
        return setup.algorithm.publish(setup.task, server, now.receivers)


def _seen_by_server(setup: Setup, now: RoundSchedule) -> Round:
    return Round(now.round, now.participants, setup.task.seed)


def _moved(transport: Transport, now: RoundSchedule) -> dict[str, np.ndarray]:
    """The bytes of a round: logical ones of each client, and those that ranks have sent each other since the last."""
    wire_down, wire_up = transport.counter.take("data")
    return {
        "up": now.up_bytes,
        "down": now.down_bytes,
        "wire_up": np.array(wire_up),
        "wire_down": np.array(wire_down),
    }
