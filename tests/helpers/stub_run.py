"""One round on the stub device or on the host: what comes out, and what the device was asked to do meanwhile."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

import quick_run
from counts import Counts
from pflmpi import tree
from pflmpi.config import load as configuration
from pflmpi.data.dataset import Dataset
from pflmpi.data.federation import Federation, build
from pflmpi.experiment import build as building
from pflmpi.learning.task import HOST
from pflmpi.models import conv_net, resnet18
from pflmpi.runtime import contract, evaluation, rounds
from pflmpi.runtime.client_state import allocate, initialise
from pflmpi.runtime.executors.base import Executor
from pflmpi.runtime.round_report import RoundHooks
from pflmpi.runtime.round_schedule import schedule
from pflmpi.runtime.stopping import Stop
from pflmpi.transports.inprocess import InProcessTransport

if TYPE_CHECKING:
    from stub_device import StubDevice

CLIENTS = 3
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"name": "mlp", "hidden": 8},
    "cnn": {"name": "cnn", "kernel": 3, "padding": 1, "hidden": 8},
    "protocnn": {"name": "protocnn", "kernel": 3, "padding": 1},
    "resnet18": {"name": "resnet18"},
}
_METHODS = ("introduce", "update", "evaluate")


@dataclass(frozen=True)
class Outcome:
    """What is known after a round.

    Attributes:
        values: the state of the server and of the clients, and the correct test samples of each client.
        counts: by method of the executor, all units of the round together; "" for what is between its calls.
        units, tests: how many units trained, and how many were tested together.
    """

    values: dict[str, Tensor]
    counts: dict[str, Counts]
    units: int
    tests: int


def settings(case: dict[str, Any], model: str, executor: str, steps: int = 2) -> dict[str, Any]:
    """The configuration of one round of equal clients, whose batches are all full."""
    if case["algorithm"]["name"] == "fedfomo":  # whose default needs more clients
        case = {**case, "algorithm": {**case["algorithm"], "received_models": CLIENTS - 1}}
    training = {"rounds": 1, "participation": 1.0, "steps": steps, "batch_size": 6, "lr": 0.02}
    return quick_run.settings(
        case,
        partition={"name": "iid", "clients": CLIENTS},
        model=MODELS[model],
        training=training,
        runtime={"executor": executor, "lanes": CLIENTS},
        checkpoint={"every": 10},
    )


def run(raw: dict[str, Any], on_stub: bool, device: torch.device = HOST) -> Outcome:
    """One round of a configuration, with colour images unless the model is a perceptron.

    Args:
        device: where it runs, if not on the stub.
    """
    config = configuration.parse(raw)
    channels = 1 if raw["model"]["name"] == "mlp" else 3
    scope: contextlib.AbstractContextManager[StubDevice | None] = contextlib.nullcontext()
    if on_stub:  # a process that has the stub device gets no pinned memory from PyTorch, which a GPU needs
        import stub_device

        device, scope = stub_device.DEVICE, stub_device.stub_device()
    # Channels go last on the host alone, which changes bits.
    with pytest.MonkeyPatch.context() as monkey, scope as stub:
        for module in (conv_net, resnet18):
            monkey.setattr(module, "channels_last", lambda x: x)
        monkey.setattr(resnet18.ResidualNetwork, "trains_channels_last", False)
        monkey.setattr(contract._Snapshot, "now", lambda *_: None)  # of the first rounds alone, so no cost of a round
        experiment = building.prepare(config, device, federation=federation(channels))
        setup = building.setup(experiment, 1, 1)
        watched = _Watched(setup.executor, stub)
        monkey.setattr(evaluation, "evaluate_together", watched.watch("evaluate", evaluation.evaluate_together))
        setup = replace(setup, executor=watched)
        population = allocate(experiment.cohort, np.arange(len(experiment.cohort)), setup.templates)
        initialise(population, setup.algorithm, experiment.tasks)
        server = setup.algorithm.init_server(setup.task)
        seen: list[Any] = []
        checkpoints = mock.MagicMock(take_seconds=lambda: 0.0)
        before = Counts() if stub is None else replace(stub.counts)
        transport = InProcessTransport()
        hooks = RoundHooks(setup, transport, checkpoints, seen.append, Stop())
        scheduled = schedule(setup, config.evaluation, config.checkpoint, None)
        skips = config.runtime.client_errors == "skip"
        server = rounds.run(setup, transport, scheduled, hooks, checkpoints, server, population, skips)
        if stub is not None:
            watched.counts[""] = stub.counts - before
            for name in _METHODS:
                watched.counts[""] -= watched.counts[name]
    values = {f"server/{path}": leaf for path, leaf in tree.leaves(server)}
    values |= {f"client/{path}": leaf for path, leaf in tree.leaves(population.cohorts[0].rows)}
    values["correct"] = torch.from_numpy(seen[-1].scores.correct)
    return Outcome(values, watched.counts, watched.calls["update"], watched.calls["evaluate"])


class _Watched:
    """An executor whose calls are counted."""

    def __init__(self, executor: Executor, stub: "StubDevice | None") -> None:
        self._executor, self._stub = executor, stub
        self.calls: Counter[str] = Counter()
        self.counts = {name: Counts() for name in _METHODS}

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._executor, name)
        return self.watch(name, method) if name in _METHODS else method

    def watch(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose calls count as those of a method."""

        @functools.wraps(method)
        def counted(*args: Any) -> Any:
            before = None if self._stub is None else replace(self._stub.counts)
            result = method(*args)
            if self._stub is not None:
                self.counts[name] += self._stub.counts - before
            self.calls[name] += 1
            return result

        return counted


@functools.cache
def federation(channels: int) -> Federation:
    """The clients, with 24 training samples and 8 test samples of each client, of random images."""
    raw = quick_run.settings(partition={"name": "iid", "clients": CLIENTS})
    config = configuration.parse(raw)
    samples = 32 * CLIENTS
    dataset = Dataset(
        name="random",
        images=np.random.default_rng(0).integers(0, 256, (samples, channels, 8, 8), np.uint8),
        labels=np.arange(samples) % 10,
        official_test=np.zeros(samples, bool),
        writers=None,
        num_classes=10,
        mean=(0.4, 0.5, 0.6)[:channels],
        std=(0.2, 0.3, 0.4)[:channels],
        digest="0" * 64,
    )
    return build(dataset, config.partition, config.data, 0)
