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
from pflmpi.run.build import Experiment, client_templates, kept_reply, setup
from pflmpi.runtime import checkpoints as saving
from pflmpi.runtime import rounds, tensorboard
from pflmpi.runtime.checkpoints import Checkpoints
from pflmpi.runtime.client_state import Population, allocate, from_flat
from pflmpi.runtime.faults import together
from pflmpi.runtime.progress import Observer
from pflmpi.runtime.rounds import Setup
from pflmpi.runtime.stopping import Stop
from pflmpi.store import metrics_file, run_folder
from pflmpi.store.layout import Layout
from pflmpi.transports.base import Transport
from pflmpi.transports.detect import Launch
from pflmpi.transports.peers import names
from pflmpi.tree import Tree

T = TypeVar("T")
_NONE = -1  # no checkpoint to go on from
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where this rank is, and when it should stop."""

    transport: Transport
    launch: Launch
    device: torch.device
    slots: int
    stop: Stop = field(default_factory=Stop)


@dataclass(frozen=True)
class _Stand:
    """Where a run stands on this rank."""

    done: int  # rounds
    server: Tree  # {} but on rank 0
    layout: Layout


def carry_out(experiment: Experiment, run: Path, place: Place, done: int | None, observe: Observer) -> None:
    """Run the rounds after `done`, or all of them if it is None, on all ranks.

    Where the transport can go on without a rank, the others take its clients over, from the newest complete checkpoint,
    and the rounds after it are repeated.
    """
    while True:
        keeper: Checkpoints | None = None
        try:
            ready, population = _ready(experiment, place)
            stand = (
                _begin(experiment, ready, population, place)
                if done is None
                else _restore(run, ready, population, place, done)
            )
            keeper = _checkpoints(run, experiment, ready, place, stand)
            wanted = experiment.config.output.tensorboard and place.transport.rank == 0
            with tensorboard.writing(run, wanted, observe) as watch:
                rounds.run(ready, place.transport, keeper, stand.server, population, stand.done, watch, place.stop)
            return
        except RankLost as loss:
            done = _recover(run, place, keeper, loss)
        except BaseException:
            if keeper is not None:
                keeper.close()
            raise


def despite_losses(transport: Transport, function: Callable[[], T]) -> T:
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


def recorded(experiment: Experiment, place: Place) -> dict[str, Any]:
    """Return what a run depends on besides its configuration."""
    return {
        "data": experiment.federation.dataset.digest,
        "partition": experiment.federation.digest,
        "device": torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else platform.machine(),
        "ranks": place.transport.size,
        "transport": place.transport.name,
        "versions": {"pflmpi": pflmpi.__version__, "torch": str(torch.__version__), "numpy": np.__version__},
    }


def number_from_root(transport: Transport, number: int) -> int:
    """Return rank 0's number on every rank."""
    buffer = np.array([number], np.int64)
    transport.broadcast(buffer.view(np.uint8))
    return int(buffer[0])


def _ready(experiment: Experiment, place: Place) -> tuple[Setup, Population]:
    transport = place.transport
    ready = setup(experiment, replace(place.launch, rank=transport.rank, size=transport.size), place.slots)
    hosted = ready.plan.hosted(transport.rank)
    kept = kept_reply(experiment.config)
    return ready, allocate(experiment.cohort, hosted, client_templates(experiment), kept)


def _begin(experiment: Experiment, ready: Setup, population: Population, place: Place) -> _Stand:
    rounds.fresh_population(ready, population, place.transport.rank)
    server = ready.algorithm.init_server(ready.task) if place.transport.rank == 0 else {}
    return _Stand(0, server, Layout.unwritten(experiment.cohort))


def _restore(run: Path, ready: Setup, population: Population, place: Place, done: int) -> _Stand:
    """Read the state after a round, and delete what is on disk of later ones."""
    transport = place.transport

    def fill() -> _Stand:
        hosted = ready.plan.hosted(transport.rank)
        for clients, arrays in run_folder.read_clients(run, done, hosted).values():
            population.put(clients, from_flat(arrays))
        server = from_flat(run_folder.read_server(run, done)) if transport.rank == 0 else {}
        return _Stand(done, server, run_folder.read_layout(run, done))

    stand = together(transport, fill)
    if transport.rank == 0:
        run_folder.discard_after(run, done)
        metrics_file.restart(run, done)
    transport.barrier()
    return stand


def _recover(run: Path, place: Place, keeper: Checkpoints | None, loss: RankLost) -> int | None:
    """Go on without the ranks that were lost; return the newest round that is complete on disk, None without any."""
    transport = place.transport

    def complete() -> int:
        if keeper is not None:
            keeper.settle(transport)
        found = together(transport, lambda: _newest_or_none(run) if transport.rank == 0 else _NONE)
        return number_from_root(transport, found)

    peers = transport.peers
    gone = _drop(transport, loss)
    done = despite_losses(transport, complete)
    if keeper is not None:
        keeper.close()
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


def _checkpoints(run: Path, experiment: Experiment, ready: Setup, place: Place, stand: _Stand) -> Checkpoints:
    fixed = saving.Fixed(
        run=run,
        rank=place.transport.rank,
        hosted=[ready.plan.hosted(rank) for rank in range(place.transport.size)],
        cohort=experiment.cohort,
        templates=saving.templates(client_templates(experiment)),
        attributes={
            "config": dump(experiment.config.resolved()),
            **{
                key: value if isinstance(value, str | int) else json.dumps(value)
                for key, value in recorded(experiment, place).items()
            },
        },
        training=experiment.config.training,
        seed=experiment.config.seed,
        settings=experiment.config.checkpoint,
    )
    return Checkpoints(fixed, stand.layout, stand.done)
