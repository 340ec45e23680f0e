"""Run the rounds of an experiment in a run's folder, again from the newest checkpoint after losing a rank."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch

from pflmpi.errors import CheckpointError, RankLost, Stopped
from pflmpi.experiment import build, stored_config
from pflmpi.experiment.agreement import check_same_setup
from pflmpi.experiment.build import Experiment
from pflmpi.experiment.restore import newest, restore
from pflmpi.runtime import idle_ranks, rounds, tensorboard
from pflmpi.runtime.checkpoints import Checkpoints
from pflmpi.runtime.client_state import Population, allocate, initialise
from pflmpi.runtime.contract import calling
from pflmpi.runtime.faults import on_root
from pflmpi.runtime.progress import Observer
from pflmpi.runtime.schedule import schedule
from pflmpi.runtime.setup import Setup
from pflmpi.runtime.stopping import Stop
from pflmpi.store import metrics_file
from pflmpi.store.layout import Layout
from pflmpi.store.lock.run_lock import RunLock
from pflmpi.transports.base import Transport
from pflmpi.transports.peers import names
from pflmpi.tree import Tree

T = TypeVar("T")
_AHEAD = 20  # rounds in which ranks that have nothing to do are looked for
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankContext:
    """Where this rank is, and when it should stop.

    Attributes:
        transport: to the other ranks.
        device: it computes on this one.
        slots: how many ranks can compute at once on all nodes.
        gpu_models: of the ranks that compute; none on CPUs.
        stop: whether it has a reason to stop.
        jobs: what starts the run again, with how often it has; see `store.lock.owner`.
        take_over: take the run from a process that still writes it.
    """

    transport: Transport
    device: torch.device
    slots: int
    gpu_models: tuple[str, ...] = ()
    stop: Stop = field(default_factory=Stop)
    jobs: Mapping[str, int] = field(default_factory=dict)
    take_over: bool = False


def run_rounds(
    experiment: Experiment,
    run: Path,
    run_id: str,
    context: RankContext,
    lock: RunLock,
    done: int | None,
    observe: Observer,
) -> None:
    """Run the rounds after `done`, or a new run if it is None, on all ranks, while rank 0 keeps the run's lock.

    Where the transport can continue without a rank, the others take its clients over, and the first of them the server
    after rank 0, and repeat the rounds after the newest complete checkpoint.

    Raises:
        Stopped: on all ranks, after a complete round, when one of them was asked to stop.
    """
    transport = context.transport
    while True:
        checkpoints: Checkpoints | None = None
        stopped, lost = None, False
        try:
            transport.counter.take("data")
            if transport.rank == 0:
                lock.keep()
            setup = build.setup(experiment, transport.size, context.slots)
            check_same_setup(experiment, setup, transport)
            if transport.rank == 0 and (
                advice := idle_ranks.advice(setup, list(islice(schedule(setup, done), 1, _AHEAD)))
            ):
                _log.warning("%s", advice)
            population = allocate(experiment.cohort, setup.placement.hosted(transport.rank), setup.templates)
            if done is None:
                server, layout = _begin(setup, population, transport)
            else:
                server, layout = restore(run, setup, population, transport, done)
            attributes = stored_config.attributes(experiment, transport, run_id)
            checkpoints = Checkpoints(run, setup, transport.rank, attributes, layout, lock, done)
            wanted = experiment.config.output.tensorboard and transport.rank == 0
            with tensorboard.writing(run, wanted, observe) as observer:
                rounds.run(setup, transport, checkpoints, server, population, done, observer, context.stop)
        except Stopped as reason:
            stopped = reason
        except RankLost:
            lost = True
        except BaseException:
            if checkpoints is not None:
                checkpoints.close()
            raise
        if transport.all_well(not lost):
            if stopped is not None:
                raise stopped
            return
        done = _recover(run, transport, checkpoints)


def retry_after_rank_loss(transport: Transport, function: Callable[[], T]) -> T:
    """Call `function` on all ranks; when one is lost in it, all that are left call it again.

    Raises:
        TransportError: the transport cannot continue without a rank.
    """
    while True:
        lost = False
        try:
            result = function()
        except RankLost:
            lost = True
        if transport.all_well(not lost):
            return result
        _drop(transport)


def _begin(setup: Setup, population: Population, transport: Transport) -> tuple[Tree, Layout]:
    """Make the state before the first round; return the server's (`{}` but on rank 0) and the empty layout."""
    initialise(population, setup.algorithm, setup.executor.tasks)
    server: Tree = {}
    if transport.rank == 0:
        with calling(setup.algorithm, "init_server", 0):
            server = setup.algorithm.init_server(setup.task)
    return server, Layout.unwritten(setup.executor.cohort)


def _recover(run: Path, transport: Transport, checkpoints: Checkpoints | None) -> int | None:
    """Drop the lost ranks; return the newest round that is complete on disk, None without any."""

    def complete() -> int | None:
        if checkpoints is not None:
            checkpoints.settle(transport)
        found = on_root(transport, newest_or_none)
        return int(found) if found else None

    def newest_or_none() -> str:
        try:
            return str(newest(run))
        except CheckpointError:
            return ""

    _drop(transport)
    done = retry_after_rank_loss(transport, complete)
    if checkpoints is not None:
        checkpoints.close()
    if transport.rank == 0:
        _log.warning("the run goes on from round %d", done or 0)
        if done is None:
            metrics_file.restart(run, 0)
    return done


def _drop(transport: Transport) -> None:
    peers = transport.peers
    gone = names(transport.drop_lost(), peers)
    if transport.rank == 0:
        logging.getLogger().setLevel(logging.WARNING)  # the other ranks are silent, and this may have been one
        _log.warning("%s died; %d ranks go on", gone, transport.size)
