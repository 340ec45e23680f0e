"""Carrying out an experiment in a run's folder, from its beginning or a checkpoint, to its last round."""

import json
import logging
import platform
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

import pflmpi
from pflmpi.config.yaml_file import dump
from pflmpi.errors import CheckpointError, RankLost
from pflmpi.learning import diagnostics, personal
from pflmpi.messages.kinds import Own
from pflmpi.run.build import Experiment, client_templates, kept_reply, setup
from pflmpi.runtime import checkpoints as saving
from pflmpi.runtime import rounds, tensorboard
from pflmpi.runtime.checkpoints import Checkpoints
from pflmpi.runtime.client_state import Population, allocate, from_flat
from pflmpi.runtime.faults import all_or_none
from pflmpi.runtime.progress import Observer
from pflmpi.runtime.setup import Setup
from pflmpi.runtime.stopping import Stop
from pflmpi.store import binding, metrics_file, run_folder
from pflmpi.store.layout import Layout
from pflmpi.transports.base import Transport
from pflmpi.transports.detect import Launch
from pflmpi.transports.peers import names
from pflmpi.transports.text import from_root
from pflmpi.tree import Tree

T = TypeVar("T")
_NONE = -1  # no checkpoint to go on from
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankContext:
    """Where this rank is, and when it should stop."""

    transport: Transport
    launch: Launch
    device: torch.device
    slots: int
    stop: Stop = field(default_factory=Stop)


@dataclass(frozen=True)
class ResumePoint:
    """Where a run stands on this rank."""

    done: int | None  # rounds; None for a new run
    server: Tree  # {} but on rank 0
    layout: Layout


def run_rounds(experiment: Experiment, run: Path, context: RankContext, done: int | None, observe: Observer) -> None:
    """Run the rounds after `done`, or all of them if it is None, on all ranks.

    Where the transport can go on without a rank, the others take its clients over, from the newest complete checkpoint,
    and the rounds after it are repeated.
    """
    run_name = from_root(context.transport, binding.run_id(run) or "")
    while True:
        checkpoints: Checkpoints | None = None
        try:
            ready, population = _ready(experiment, context)
            resume_point = (
                _begin(experiment, ready, population, context)
                if done is None
                else _restore(run, ready, population, context, done)
            )
            checkpoints = _checkpoints(run, run_name, experiment, context, resume_point)
            wanted = experiment.config.output.tensorboard and context.transport.rank == 0
            with tensorboard.writing(run, wanted, observe) as watch:
                rounds.run(
                    ready,
                    context.transport,
                    checkpoints,
                    resume_point.server,
                    population,
                    resume_point.done,
                    watch,
                    context.stop,
                )
            return
        except RankLost as loss:
            done = _recover(run, context, checkpoints, loss)
        except BaseException:
            if checkpoints is not None:
                checkpoints.close()
            raise


def retry_after_rank_loss(transport: Transport, function: Callable[[], T]) -> T:
    """Return what the function returns; where a rank is lost in it, the others call it again."""
    while True:
        try:
            return function()
        except RankLost as loss:
            _drop(transport, loss)


def newest(run: Path) -> int:
    """Return the newest good round of a run, telling of those that are damaged."""
    done, problems = run_folder.newest_good(run)
    for problem in problems:
        print(f"pflmpi: passed over a damaged checkpoint: {problem}", flush=True)
    return done


def newest_fitting(run: Path, experiment: Experiment) -> int:
    """Return the newest good round of a run, refusing one whose clients keep other arrays than they would here."""
    done = newest(run)
    expected, found = saving.templates(client_templates(experiment)), run_folder.read_kinds(run, done)
    for cohort, kinds in expected.items():
        there = found.get(cohort, {})
        other = sorted(path for path in kinds.keys() | there.keys() if kinds.get(path) != there.get(path))
        if other:
            raise CheckpointError(
                f"{run} cannot be continued: its clients keep other arrays than those of this pflmpi, such as "
                f"{other[0]}; continue it with the version that wrote it, or start a new run"
            )
    return done


def recorded(experiment: Experiment, context: RankContext, run_name: str) -> dict[str, Any]:
    """What a run depends on besides its configuration, with its id."""
    return {
        "run": run_name,
        "data": experiment.federation.dataset.digest,
        "partition": experiment.federation.digest,
        "device": torch.cuda.get_device_name(context.device) if context.device.type == "cuda" else platform.machine(),
        "ranks": context.transport.size,
        "transport": context.transport.name,
        "versions": {"pflmpi": pflmpi.__version__, "torch": str(torch.__version__), "numpy": np.__version__},
    }


def attributes(experiment: Experiment, context: RankContext, run_name: str) -> dict[str, str | int]:
    """What every round file says of its run: the configuration, what it depends on, and how to read its state."""
    algorithm, task = experiment.config.algorithm, experiment.tasks[0]
    described = {
        "algorithm_class": f"{type(algorithm).__module__}:{type(algorithm).__qualname__}",
        "summary": algorithm.summary,
        "paper": algorithm.paper,
        "personal": personal.to_json(algorithm.personal(task)),
        "diagnostics": diagnostics.to_json(algorithm.diagnostics(task)),
    }
    values = {"config": dump(experiment.config.resolved()), **recorded(experiment, context, run_name), **described}
    return {key: value if isinstance(value, str | int) else json.dumps(value) for key, value in values.items()}


def received(experiment: Experiment) -> dict[str, bool]:
    """Messages to store beside the server's state: name -> whether each client has a row of its own."""
    if kept_reply(experiment.config):
        return {}
    algorithm, task = experiment.config.algorithm, experiment.tasks[0]
    names = personal.messages(algorithm.personal(task))
    return {name: isinstance(algorithm.downlink(task)[name], Own) for name in sorted(names)}


def _ready(experiment: Experiment, context: RankContext) -> tuple[Setup, Population]:
    transport = context.transport
    ready = setup(experiment, replace(context.launch, rank=transport.rank, size=transport.size), context.slots)
    hosted = ready.placement.hosted(transport.rank)
    kept = kept_reply(experiment.config)
    return ready, allocate(experiment.cohort, hosted, client_templates(experiment), kept)


def _begin(experiment: Experiment, ready: Setup, population: Population, context: RankContext) -> ResumePoint:
    rounds.fresh_population(ready, population, context.transport.rank)
    server = ready.algorithm.init_server(ready.task) if context.transport.rank == 0 else {}
    return ResumePoint(None, server, Layout.unwritten(experiment.cohort))


def _restore(run: Path, ready: Setup, population: Population, context: RankContext, done: int) -> ResumePoint:
    """Read the state after a round, and delete what is on disk of later ones."""
    transport = context.transport

    def fill() -> ResumePoint:
        hosted = ready.placement.hosted(transport.rank)
        for clients, arrays in run_folder.read_clients(run, done, hosted).values():
            population.put(clients, from_flat(arrays))
        server = from_flat(run_folder.read_server(run, done)) if transport.rank == 0 else {}
        return ResumePoint(done, server, run_folder.read_layout(run, done))

    resume_point = all_or_none(transport, fill)
    if transport.rank == 0:
        run_folder.discard_after(run, done)
        metrics_file.restart(run, done)
    transport.barrier()
    return resume_point


def _recover(run: Path, context: RankContext, checkpoints: Checkpoints | None, loss: RankLost) -> int | None:
    """Go on without the ranks that were lost; return the newest round that is complete on disk, None without any."""
    transport = context.transport

    def complete() -> int:
        if checkpoints is not None:
            checkpoints.settle(transport)
        found = all_or_none(transport, lambda: _newest_or_none(run) if transport.rank == 0 else _NONE)
        return int(from_root(transport, str(found)))

    peers = transport.peers
    gone = _drop(transport, loss)
    done = retry_after_rank_loss(transport, complete)
    if checkpoints is not None:
        checkpoints.close()
    if transport.rank == 0:
        _log.warning("%s died; %d ranks go on, from round %d", names(gone, peers), transport.size, max(done, 0))
        if done == _NONE:
            metrics_file.restart(run, 0)
    return None if done == _NONE else done


def _drop(transport: Transport, loss: RankLost) -> list[int]:
    if transport.rank == 0:
        _log.warning("%s", loss)
    return transport.drop_lost()


def _newest_or_none(run: Path) -> int:
    try:
        return newest(run)
    except CheckpointError:
        return _NONE


def _checkpoints(
    run: Path, run_name: str, experiment: Experiment, context: RankContext, resume_point: ResumePoint
) -> Checkpoints:
    fixed = saving.Fixed(
        run=run,
        rank=context.transport.rank,
        cohort=experiment.cohort,
        templates=saving.templates(client_templates(experiment)),
        attributes=attributes(experiment, context, run_name),
        keep=experiment.config.checkpoint.keep,
        received=received(experiment),
        partition={
            "train_samples": experiment.federation.num_train,
            "test_samples": experiment.federation.num_test,
        },
    )
    return Checkpoints(fixed, resume_point.layout, resume_point.done)
