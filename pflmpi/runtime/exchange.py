"""The exchange of a round: the participants' messages go up, answers and the server's reply come down."""

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.algorithms.base import Algorithm, Round
from pflmpi.errors import AlgorithmError, ConfigError
from pflmpi.messages.downlink import Homes, Reply, send_answers, send_down
from pflmpi.messages.groups import ClientGroup, clients_of
from pflmpi.messages.kinds import Messages, Updates
from pflmpi.messages.uplink import send_up
from pflmpi.runtime.checkpoints import ServerRound
from pflmpi.runtime.client_state import Population
from pflmpi.runtime.contract import ANSWERED, calling, check_returned, check_state
from pflmpi.runtime.round_schedule import RoundSchedule
from pflmpi.runtime.setup import Setup
from pflmpi.text import format_bytes
from pflmpi.transports.base import Transport
from pflmpi.tree import Tree


def exchange(
    setup: Setup,
    transport: Transport,
    server: Tree,
    population: Population,
    ups: Updates,
    now: RoundSchedule,
) -> tuple[ServerRound, Reply]:
    """Update the server with the participants' messages, answer these, and send its reply to the receivers.

    Args:
        server: its state before; rank 0 only.
        population: the clients that live here; the participants keep their answers.
        ups: what the clients here send; emptied as soon as it is sent, because it is large.
    """
    algorithm, task = setup.algorithm, setup.task
    published: Messages | None = None
    answers: Messages | None = None
    measured: Mapping[str, Tensor] = {}
    round = Round(now.round, now.participants, task.seed)
    up: Messages | None = None
    if len(now.participants):
        up = send_up(transport, setup.declared, ups, now.training, setup.executor.device)
    ups.clear()
    if up is not None:
        reads: Tree = {"server": server, "up": {**up}}
        if setup.declared.answers:
            with calling(algorithm, "answer", now.round, reads=reads):
                answers = algorithm.answer(task, server, up, round)
            check_returned(algorithm, "answer", answers)
        if not now.opening:  # in every round: a signal may call for a checkpoint after any
            with calling(algorithm, "diagnose", now.round, reads=reads):
                measured = algorithm.diagnose(task, server, up, round)
            check_returned(algorithm, "diagnose", measured)
        with calling(algorithm, "server_update", now.round, reads=reads):
            new = algorithm.server_update(task, server, up, round)
        check_state(algorithm, "server_update", new, server)
        _check_finite(algorithm, now.round, new, server)
        server = new
        del reads
    del up
    if setup.declared.answers and len(now.participants):
        groups = now.training[transport.rank]
        _store_answers(population, groups, send_answers(transport, setup.declared, answers, now.training))
    if transport.rank == 0:
        with calling(algorithm, "publish", now.round, reads={"server": server}):
            published = algorithm.publish(task, server, now.receivers)
        check_returned(algorithm, "publish", published)
    homes = Homes(setup.placement.home, population.kept)
    reply = send_down(transport, setup.declared, published, now.receiving, setup.executor.device, homes)
    return ServerRound(server, published, measured), reply


def check_server_memory(setup: Setup, rounds: Iterable[RoundSchedule], free: int) -> None:
    """Raise `ConfigError` if rank 0 cannot have the rows of all participants, or for all receivers, in `free` bytes."""
    for now in rounds:
        needed = setup.declared.rows_bytes(len(now.participants), len(now.receivers))
        if sum(needed.values()) > free:
            largest = max(needed, key=needed.__getitem__)
            raise ConfigError(
                f"rank 0 needs {format_bytes(sum(needed.values()))} of memory for rows of {len(now.participants)} "
                f"participants and {len(now.receivers)} receivers, most of it for {type(setup.algorithm).__name__}'s "
                f"message {largest!r}, and {format_bytes(free)} are free; lower training.participation, choose a "
                "smaller model, or give rank 0 a node with more memory"
            )


def _check_finite(algorithm: Algorithm, round: int, new: Tree, before: Tree) -> None:
    """Raise `AlgorithmError` if the server's state has values that are not finite where it had none before."""
    for path, leaf in tree.leaves(new):
        old = tree.at(before, path)
        if leaf is old or not leaf.is_floating_point() or leaf.sum().isfinite():  # a sum takes less time than the rest
            continue
        if not leaf.isfinite().all() and old.isfinite().all():
            raise AlgorithmError(
                f"{type(algorithm).__name__}.server_update (round {round}) returned values in {path} that are not "
                "finite, from messages that are"
            )


def _store_answers(population: Population, groups: list[ClientGroup], answers: Messages) -> None:
    """Give the clients of some groups the rows [m, ...] of all of them, in ascending order."""
    clients = clients_of(groups)
    for group in groups:
        rows = torch.from_numpy(np.searchsorted(clients, group))
        own = tree.map(lambda leaf, rows=rows: leaf.index_select(0, rows), dict(answers))
        population.put(group, {ANSWERED: own})
