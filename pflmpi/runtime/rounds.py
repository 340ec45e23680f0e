"""The loop of a run, for every rank: there is no other."""

import time
from dataclasses import dataclass

import numpy as np

from pflmpi import tree
from pflmpi.algorithms.base import Algorithm, Round
from pflmpi.errors import Stopped
from pflmpi.learning.task import HOST, Task
from pflmpi.messages.declared import Declared
from pflmpi.messages.downlink import Reply, send_down
from pflmpi.messages.groups import ClientGroup
from pflmpi.messages.kinds import Messages, Own, OwnClasses
from pflmpi.messages.uplink import send_up
from pflmpi.runtime import evaluation, report
from pflmpi.runtime.checkpoints import Checkpoints
from pflmpi.runtime.client_state import Population
from pflmpi.runtime.config import LEAST_TIMEOUT, CheckpointConfig, EvaluationConfig
from pflmpi.runtime.evaluation import Scores
from pflmpi.runtime.executor import Executor
from pflmpi.runtime.placement import Placement
from pflmpi.runtime.progress import Observer, Progress
from pflmpi.runtime.stopping import Stop
from pflmpi.transports.base import Transport
from pflmpi.tree import Tree

_FIRST_ROUND = 3600.0  # seconds to wait for other ranks while no round has been measured
_PATIENCE = 20.0  # times the longest round, afterwards


@dataclass(frozen=True)
class Setup:
    """Everything that stays the same during a run, on one rank."""

    algorithm: Algorithm
    task: Task  # the server's, on the host
    executor: Executor
    placement: Placement
    declared: Declared
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    num_test: np.ndarray  # [N]
    timeout: float | None  # seconds that a call waits for the other ranks; None follows the length of the rounds


def run(
    setup: Setup,
    transport: Transport,
    checkpoints: Checkpoints,
    server: Tree,
    population: Population,
    done: int,
    observe: Observer,
    stop: Stop,
) -> Tree:
    """Run the rounds after `done` to the last; return the final server state (rank 0).

    Args:
        server: the server's state after round `done`; rank 0 only, `{}` elsewhere.
        population: the clients that live here, after round `done`; changed in executor.
        observe: called on rank 0 after every round.
        stop: whether this rank has a reason to stop.

    Raises:
        Stopped: on all ranks, when one of them has a reason to stop; the last round is complete and on disk.
    """
    told = time.perf_counter()  # when the last round was told of
    training, n = setup.task.training, setup.task.num_clients
    if setup.timeout is None:
        transport.timeout = _FIRST_ROUND
    changed = np.ones(n, bool)  # since the last evaluation
    correct = np.zeros(n, np.int64)
    if done == 0 and setup.algorithm.introduces:
        server = _introduce(setup, transport, server, population)
    reply = _send(setup, transport, server, _receivers(setup, done))
    if done == 0:
        for group in setup.placement.assign(np.arange(n))[transport.rank] if population.kept_reply else ():
            population.keep_reply(group, reply)
        checkpoints.start(server, population)
    for round in range(done + 1, training.rounds + 1):
        began = time.perf_counter()
        participants = training.participants(setup.task.seed, round, n)
        assigned = setup.placement.assign(participants)
        ups = _update(setup, population, reply, assigned[transport.rank], round)
        computed = time.perf_counter()
        up = send_up(transport, setup.declared, ups, assigned, round)
        del ups
        if up is not None:
            server = setup.algorithm.server_update(setup.task, server, up, Round(round, participants, setup.task.seed))
        reply = _send(setup, transport, server, _receivers(setup, round))
        for group in assigned[transport.rank]:
            population.keep_reply(group, reply)
        exchanged = time.perf_counter()

        changed[participants] = True
        due = round % setup.evaluation.every == 0 or round == training.rounds
        tested = _to_test(setup, changed) if due else np.empty(0, np.int64)
        testing = evaluation.assign(setup.placement, setup.num_test, tested)
        right = evaluation.evaluate(setup.executor, population, reply, testing[transport.rank], round)
        evaluated = time.perf_counter()

        busy = (computed - began) + (evaluated - exchanged)
        news = report.gather(transport, testing, right, busy, checkpoints.shards_done)
        if due:
            changed[:] = False
        if news is not None:
            correct[tested] = news.correct
            scores = Scores(correct.copy(), setup.num_test) if due else None
            progress = Progress(
                round,
                participants,
                scores,
                {
                    "compute": news.busiest,
                    "exchange": exchanged - computed,
                    "evaluation": evaluated - exchanged,
                    "checkpoint": checkpoints.take_seconds(),
                    "round": (ended := time.perf_counter()) - told,
                },
                _count(setup, transport, participants, round),
            )
            told = ended
            checkpoints.record(progress, news.shards_done)
            observe(progress)
        stopping = _stopping(setup, transport, stop, round, time.perf_counter() - began)
        if round % setup.checkpoint.every == 0 or round == training.rounds or stopping:
            checkpoints.save(round, server, population)
        if stopping:
            checkpoints.finish(transport)
            raise Stopped(f"{stop.reason or 'another rank was asked to stop'}: stopped after round {round}")
    checkpoints.finish(transport)
    return server


def _stopping(setup: Setup, transport: Transport, stop: Stop, round: int, seconds: float) -> bool:
    """Return whether a rank has a reason to stop before the last round; the ranks agree on it."""
    stop.round_took(seconds)
    longest, wish = transport.maximum(np.array([stop.longest, 1.0 if stop.reason else 0.0]))
    if setup.timeout is None:
        transport.timeout = max(LEAST_TIMEOUT, _PATIENCE * float(longest))
    return bool(wish) and round < setup.task.training.rounds


def _update(
    setup: Setup, population: Population, reply: Reply, groups: list[ClientGroup], round: int
) -> list[tuple[ClientGroup, Messages]]:
    ups = []
    for group in groups:
        states, up = setup.executor.update(group, population.get(group), reply.for_clients(group), round)
        population.put(group, states)
        ups.append((group, up))
    return ups


def _introduce(setup: Setup, transport: Transport, server: Tree, population: Population) -> Tree:
    everyone = np.arange(setup.task.num_clients)
    assigned = setup.placement.assign(everyone)
    ups = [(group, setup.executor.introduce(group, population.get(group))) for group in assigned[transport.rank]]
    up = send_up(transport, setup.declared, ups, assigned, 0)
    if up is None:
        return server
    return setup.algorithm.server_update(setup.task, server, up, Round(0, everyone, setup.task.seed))


def _receivers(setup: Setup, round: int) -> np.ndarray:
    """Return the clients that get a row of their own after a round: who trains next, and who is tested with it."""
    training, n = setup.task.training, setup.task.num_clients
    upcoming = (
        training.participants(setup.task.seed, round + 1, n) if round < training.rounds else np.empty(0, np.int64)
    )
    kinds = [setup.declared.down[name] for name in setup.algorithm.predicts_with]
    if not any(isinstance(kind, Own | OwnClasses) for kind in kinds):
        return upcoming
    if round == 0 or setup.evaluation.absent == "latest":
        return np.arange(n)
    return np.union1d(upcoming, training.participants(setup.task.seed, round, n))


def _send(setup: Setup, transport: Transport, server: Tree, receivers: np.ndarray) -> Reply:
    published = None
    if transport.rank == 0:
        published = setup.algorithm.publish(setup.task, server, receivers)
    return send_down(transport, setup.declared, published, setup.placement.assign(receivers))


def _to_test(setup: Setup, changed: np.ndarray) -> np.ndarray:
    """Return the clients whose personal model may differ from the one tested last."""
    by_state = not setup.algorithm.predicts_with or setup.evaluation.absent == "last_received"
    if by_state and not setup.executor.adapts:
        return np.flatnonzero(changed)
    return np.arange(len(changed))


def _count(setup: Setup, transport: Transport, participants: np.ndarray, round: int) -> dict[str, np.ndarray]:
    """Return the bytes of a round; an introduction belongs to the first."""
    up, down = (np.zeros(setup.task.num_clients, np.int64) for _ in range(2))
    up[participants] = setup.declared.up_bytes(participants)
    if round == 1 and setup.algorithm.introduces:
        up += setup.declared.up_bytes(np.arange(len(up)))
    down[participants] = setup.declared.down_bytes(participants)
    wire_down, wire_up = transport.counter.take("data")
    return {"up": up, "down": down, "wire_up": np.array(wire_up), "wire_down": np.array(wire_down)}


def fresh_population(setup: Setup, population: Population, rank: int) -> None:
    """Fill the rows of the clients that live on a rank with their initial state."""
    for group in setup.placement.assign(setup.placement.hosted(rank))[rank]:
        for client in group:
            task = setup.executor.tasks[setup.executor.cohort[client]]
            state = setup.algorithm.init_client(task.replace(device=HOST), int(client))
            population.put(np.array([client]), tree.map(lambda leaf: leaf.unsqueeze(0), state))
