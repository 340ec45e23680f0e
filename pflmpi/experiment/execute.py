"""Run the rounds of an experiment in a run's folder."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch

from pflmpi.config.load import Config
from pflmpi.config.sections import by_key
from pflmpi.errors import Stopped
from pflmpi.experiment import build, stored_config
from pflmpi.experiment.agreement import check_same_setup
from pflmpi.experiment.build import Experiment
from pflmpi.experiment.restore import client_seconds, restore
from pflmpi.learning.early_stop import EarlyStop
from pflmpi.machine import memory
from pflmpi.runtime import idle_ranks, rounds
from pflmpi.runtime.checkpoints import Checkpoints
from pflmpi.runtime.client_state import Population, allocate, initialise
from pflmpi.runtime.config import OutputConfig
from pflmpi.runtime.contract import calling, check_returned
from pflmpi.runtime.exchange import check_server_memory
from pflmpi.runtime.faults import all_or_none, on_root
from pflmpi.runtime.progress import Observer
from pflmpi.runtime.schedule import schedule
from pflmpi.runtime.setup import Setup
from pflmpi.runtime.state.storage import folder_of
from pflmpi.runtime.stopping import Stop
from pflmpi.runtime.trackers.base import Tracked
from pflmpi.runtime.trackers.tracking import tracked
from pflmpi.store.layout import Layout
from pflmpi.store.lock.run_lock import RunLock
from pflmpi.store.metrics import metrics_file
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

    Raises:
        Stopped: on all ranks, after a complete round, when one of them was asked to stop.
    """
    transport = context.transport
    transport.counter.take("data")
    seconds = client_seconds(run, transport, done)
    setup = build.setup(experiment, transport.size, context.slots, seconds, transport.rank)
    check_same_setup(experiment, setup, transport)
    ahead = list(islice(schedule(setup, done), _AHEAD)) if transport.rank == 0 else []
    if ahead and (advice := idle_ranks.advice(setup, ahead[1:])):
        _log.warning("%s", advice)
    here = setup.placement.hosted(transport.rank), setup.templates, folder_of(experiment.config.runtime, run)

    def allocated() -> Population:
        check_server_memory(setup, ahead, memory().free)
        return allocate(experiment.cohort, *here)

    population = all_or_none(transport, allocated)
    if done is None:
        server, layout = _begin(setup, population, transport)
    else:
        server, layout = restore(run, setup, population, transport, done)
    attributes = stored_config.attributes(experiment, transport, run_id)
    checkpoints = Checkpoints(run, setup, transport.rank, attributes, layout, lock)
    output = experiment.config.output if transport.rank == 0 else OutputConfig()
    try:
        with tracked(Tracked(run, run_id, by_key(experiment.config.resolved())), output, observe) as observer:
            if not _has_ended(run, experiment.config, context):
                rounds.run(setup, transport, checkpoints, server, population, done, observer, context.stop)
    except Stopped:
        raise
    except BaseException:
        checkpoints.close()
        raise


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
