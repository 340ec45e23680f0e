"""The exchange of a round: participants' messages up, the server's update, answers and the reply down."""

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
from pflmpi.runtime.contract import ANSWERED, call_server_method, calling, check_returned, check_state
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
    """Update the server with the participants' messages, answer them, and send its reply to the receivers.

    Args:
        server: its state before; rank 0 only.
        population: the clients that live here; the participants among them store their answers.
        ups: messages of the participants here; cleared once they are sent, because they are large.
    """
    algorithm, task = setup.algorithm, setup.task
    answers: Messages | None = None
    diagnostics: Mapping[str, Tensor] = {}
    up: Messages | None = None
    if len(now.participants):
        up = send_up(transport, setup.declared, ups, now.training, setup.executor.device)
    ups.clear()
    if up is not None:
        server, answers, diagnostics = _update_server(setup, server, up, now)
    del up
    if setup.declared.answers and len(now.participants):
        groups = now.training[transport.rank]
        _store_answers(population, groups, send_answers(transport, setup.declared, answers, now.training))
    published: Messages | None = None
    if transport.rank == 0:
        published = call_server_method(algorithm, "publish", now.round, {"server": server}, task, server, now.receivers)
    homes = Homes(setup.placement.home, population.kept)
    reply = send_down(transport, setup.declared, published, now.receiving, setup.executor.device, homes)
    return ServerRound(server, published, diagnostics), reply


def _update_server(
    setup: Setup, server: Tree, up: Messages, now: RoundSchedule
) -> tuple[Tree, Messages | None, Mapping[str, Tensor]]:
    """Returns the server's new state, its answers if it gives any, and its diagnostics; rank 0 only."""
    algorithm, task = setup.algorithm, setup.task
    round = Round(now.round, now.participants, task.seed)
    reads: Tree = {"server": server, "up": {**up}}
    answers: Messages | None = None
    if setup.declared.answers:
        answers = call_server_method(algorithm, "answer", now.round, reads, task, server, up, round)
    diagnostics: Mapping[str, Tensor] = {}
    if not now.opening:  # in every round, because a signal may require a checkpoint after any
        with calling(algorithm, "diagnose", now.round, reads=reads):  # may measure time
            diagnostics = algorithm.diagnose(task, server, up, round)
        check_returned(algorithm, "diagnose", diagnostics)
    new_server = call_server_method(algorithm, "server_update", now.round, reads, task, server, up, round)
    check_state(algorithm, "server_update", new_server, server)
    _check_finite(algorithm, now.round, new_server, server)
    return new_server, answers, diagnostics


def check_server_memory(setup: Setup, rounds: Iterable[RoundSchedule], free: int) -> None:
    """Raise `ConfigError` if the rows of all participants and receivers of a round exceed rank 0's `free` bytes."""
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
    """Raise `AlgorithmError` if a leaf of the server's state that was finite before is not any more."""
    for path, leaf in tree.leaves(new):
        old = tree.at(before, path)
        if leaf is old or not leaf.is_floating_point() or leaf.sum().isfinite():  # a sum is cheaper than isfinite
            continue
        if not leaf.isfinite().all() and old.isfinite().all():
            raise AlgorithmError(
                f"{type(algorithm).__name__}.server_update (round {round}) returned values in {path} that are not "
                "finite, from messages that are"
            )


def _store_answers(population: Population, groups: list[ClientGroup], answers: Messages) -> None:
    """Store each client's row of `answers` [m, ...], which are in ascending order of all groups' ids."""
    clients = clients_of(groups)
    for group in groups:
        rows = torch.from_numpy(np.searchsorted(clients, group))
        group_answers = tree.map(lambda leaf, rows=rows: leaf.index_select(0, rows), dict(answers))
        population.put(group, {ANSWERED: group_answers})
