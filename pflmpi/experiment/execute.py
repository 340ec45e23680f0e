"""Run the rounds of an experiment in a run's folder, again from the newest checkpoint after losing a rank."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch

from pflmpi.config.load import Config
from pflmpi.config.sections import by_key
from pflmpi.errors import CheckpointError, RankLost, Stopped
from pflmpi.experiment import build, stored_config
from pflmpi.experiment.agreement import check_same_setup
from pflmpi.experiment.build import Experiment
from pflmpi.experiment.joining import Waiting
from pflmpi.experiment.restore import client_seconds, newest, restore
from pflmpi.experiment.retrying import drop_lost, retry_after_rank_loss
from pflmpi.learning.early_stop import EarlyStop
from pflmpi.runtime import idle_ranks, rounds
from pflmpi.runtime.checkpoints import Checkpoints
from pflmpi.runtime.client_state import Population, allocate, initialise
from pflmpi.runtime.config import OutputConfig
from pflmpi.runtime.contract import calling, check_returned
from pflmpi.runtime.faults import all_or_none, on_root
from pflmpi.runtime.progress import Observer
from pflmpi.runtime.schedule import schedule
from pflmpi.runtime.setup import Setup
from pflmpi.runtime.state.storage import folder_of
from pflmpi.runtime.stopping import Joining, Stop
from pflmpi.runtime.trackers.base import Tracked
from pflmpi.runtime.trackers.tracking import tracked
from pflmpi.store.layout import Layout
from pflmpi.store.lock.run_lock import RunLock
from pflmpi.store.metrics import metrics_file
from pflmpi.store.records.segments import clear
from pflmpi.text import for_shell
from pflmpi.transports.base import Transport
from pflmpi.tree import Tree

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
        first: of the processes that were started with this one; says what the user there should know.
    """

    transport: Transport
    device: torch.device
    slots: int
    gpu_models: tuple[str, ...] = ()
    stop: Stop = field(default_factory=Stop)
    jobs: Mapping[str, int] = field(default_factory=dict)
    take_over: bool = False
    first: bool = False

    @property
    def speaks(self) -> bool:
        """Whether this rank says what concerns all."""
        return self.first or self.transport.rank == 0


class Paused(Exception):
    """Raised on all ranks after a complete round that is on disk: others wait to join. Rank 0 keeps the lock."""

    def __init__(self, run: Path, lock: RunLock, experiment: Experiment) -> None:
        super().__init__(f"others wait to join {run}")
        self.run, self.lock, self.experiment = run, lock, experiment


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
        Paused: likewise, when others wait to join.
    """
    transport = context.transport
    while True:
        checkpoints: Checkpoints | None = None
        setup: Setup | None = None  # that of more ranks goes first, with its samples on the device
        pause: Stopped | Paused | None = None
        lost = False
        try:
            transport.counter.take("data")
            if transport.rank == 0:
                lock.keep()
            seconds = client_seconds(run, transport, done)
            setup = build.setup(experiment, transport.size, context.slots, seconds, transport.rank)
            check_same_setup(experiment, setup, transport)
            if context.speaks and (advice := idle_ranks.advice(setup, list(islice(schedule(setup, done), 1, _AHEAD)))):
                _log.warning("%s", advice)
            here = (setup.placement.hosted(transport.rank), setup.templates, folder_of(experiment.config.runtime, run))
            population = all_or_none(transport, partial(allocate, experiment.cohort, *here))
            if done is None:
                server, layout = _begin(setup, population, transport)
            else:
                server, layout = restore(run, setup, population, transport, done)
            attributes = stored_config.attributes(experiment, transport, run_id)
            checkpoints = Checkpoints(run, setup, transport.rank, attributes, layout, lock)
            output = experiment.config.output if transport.rank == 0 else OutputConfig()
            with tracked(Tracked(run, run_id, by_key(experiment.config.resolved())), output, observe) as observer:
                stop, others_wait = context.stop, Waiting(run, experiment, transport)
                if not _has_ended(run, experiment.config, context):
                    rounds.run(setup, transport, checkpoints, server, population, done, observer, stop, others_wait)
        except Stopped as reason:
            pause = reason
        except Joining:
            pause = Paused(run, lock, replace(experiment))  # a copy, without the samples on the device
        except RankLost:
            lost = True
        except BaseException:
            if checkpoints is not None:
                checkpoints.close()
            raise
        if transport.all_well(not lost):
            if pause is not None:
                raise pause
            return
        done = _recover(run, transport, checkpoints)


def _has_ended(run: Path, config: Config, context: RankContext) -> bool:
    """Whether the run has ended early, by its metrics so far, which rank 0 says."""
    if config.training.stop is None:
        return False

    def by_metrics() -> str:
        context.stop.early = early = EarlyStop(config.training.stop, lines := metrics_file.read(run))
        if early.met and (done := int(lines[-1]["round"])) < config.training.rounds:
            print(
                f"pflmpi: nothing is left to do: {run} has stopped early after round {done}: {early.why}; "
                f"`pflmpi resume {for_shell(run)} -s training.stop=null` goes on to round {config.training.rounds}",
                flush=True,
            )
        return "yes" if early.met else ""

    return bool(on_root(context.transport, by_metrics))


def _begin(setup: Setup, population: Population, transport: Transport) -> tuple[Tree, Layout]:
    """Make the state before the first round; return the server's (`{}` but on rank 0) and the empty layout."""
    initialise(population, setup.algorithm, setup.executor.tasks)
    server: Tree = {}
    if transport.rank == 0:
        with calling(setup.algorithm, "init_server", 0):
            server = setup.algorithm.init_server(setup.task)
        check_returned(setup.algorithm, "init_server", server)
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

    drop_lost(transport)
    done = retry_after_rank_loss(transport, complete)
    if checkpoints is not None:
        checkpoints.close()
    if transport.rank == 0:
        _log.warning("the run goes on from round %d", done or 0)
        if done is None:
            clear(run)
            metrics_file.restart(run, 0)
    return done
