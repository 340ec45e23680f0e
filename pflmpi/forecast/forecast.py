"""Forecast of a run from its configuration and the machines it is planned for."""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from pflmpi.config.load import Config
from pflmpi.errors import ConfigError
from pflmpi.experiment.build import Experiment, build_experiment, load_federation, prepare, setup
from pflmpi.forecast.bytes import DiskForecast, StateSizes, compute_state_sizes, data_bytes, forecast_disk, mapped_bytes
from pflmpi.forecast.measuring import Costs, Measurement, ProcessMemory, measure_cohorts, read_resident
from pflmpi.forecast.memory import RankMemory, forecast_memory
from pflmpi.forecast.ranks import Ranks, TransportName, lay_out
from pflmpi.learning.task import HOST
from pflmpi.machine import own_memory
from pflmpi.messages.groups import ClientGroup
from pflmpi.messages.traffic import wire_bytes
from pflmpi.runtime.devices import check_cpu_settings, choose_device, fix_kernels
from pflmpi.runtime.round_schedule import RoundSchedule, schedule
from pflmpi.runtime.setup import Setup

_CONTROL_CALLS = 2  # collective calls of a round besides messages: the report, and the agreement to go on
_MIN_ROUNDS, _MAX_ROUNDS = 20, 200  # first rounds that are scheduled


@dataclass(frozen=True)
class Resources:
    """Machines that the run is planned for.

    Attributes:
        ranks, nodes: how many.
        gpus, cores: of each node.
        memory, gpu_memory: bytes of a node and of a GPU; None if unknown.
        delay: seconds between nodes, one way; None if unknown.
        rate: bytes per second between nodes; None if unknown.
    """

    ranks: int
    nodes: int
    gpus: int
    cores: int
    memory: int
    gpu_memory: int | None
    delay: float | None
    rate: float | None


@dataclass(frozen=True)
class Seconds:
    """Mean seconds of a round, without the server, checkpoints and the summation of messages."""

    train: float  # of the slowest rank
    messages: float | None  # between nodes; None if the link is unknown
    test: float  # of the slowest rank; 0 for a round without an evaluation

    @property
    def round(self) -> float:
        return self.train + (self.messages or 0.0) + self.test


@dataclass(frozen=True)
class Forecast:
    """What a run will need.

    Attributes:
        experiment, setup, ranks: what would run, and where.
        opening, rounds: schedule of what precedes the first round, and of the first rounds; if none of these has an
            evaluation, the last one is the first that has.
        measured: costs on this machine.
        loading: seconds to load data and set up, in one process on this machine.
    """

    resources: Resources
    experiment: Experiment
    setup: Setup
    ranks: Ranks
    opening: RoundSchedule
    rounds: Sequence[RoundSchedule]
    sizes: StateSizes
    memory: list[RankMemory]
    disk: DiskForecast
    transport: TransportName
    measured: Measurement
    loading: float

    @property
    def gpu_memory(self) -> float | None:
        """Bytes of a GPU that the run may use; None if unknown."""
        whole = self.resources.gpu_memory
        return None if whole is None else whole * self.ranks.runtime.gpu_memory

    @property
    def state_on_disk(self) -> int:
        """Bytes of clients' state in mapped files, on all nodes, after the last round."""
        on_disk = self.experiment.config.runtime.state == "disk"
        return int(self.sizes.at_the_end(self.setup).sum()) if on_disk else 0

    def start_up(self, imports: float) -> float:
        """Approximate seconds until all ranks are ready; ranks of a node take turns on its cores.

        Args:
            imports: seconds of one process before it reads data.
        """
        return (imports + self.loading) * max(len(self.ranks.of_node[0]) / self.resources.cores, 1.0)

    @cached_property
    def seconds(self) -> Seconds | None:
        """Estimated seconds of a round; None if nothing could be measured."""
        if not self.measured.costs:
            return None
        train, test = compute_seconds(self.ranks, self.resources.cores, self.rounds, self.measured.costs)
        moved = sum(wire for _, _, wire in self.bytes_per_round())
        calls = _CONTROL_CALLS + float(_mean(self.rounds, lambda plan: sum(call.moved > 0 for call in plan.calls)))
        here = self.resources
        return Seconds(train, message_seconds(moved, calls, here.ranks, here.nodes, here.delay, here.rate), test)

    def bytes_per_round(self) -> list[tuple[str, float, float]]:
        """Returns (direction, logical bytes, bytes between ranks) for up and down: means of the first rounds."""
        if not self.rounds:
            return [("up", 0.0, 0.0), ("down", 0.0, 0.0)]
        logical = _mean(self.rounds, lambda plan: (plan.up_bytes.sum(), plan.down_bytes.sum()))
        wire = _mean(self.rounds, lambda plan: wire_bytes(plan.calls))
        wire = wire + np.array(wire_bytes(self.opening.calls)) / self.rounds[-1].round
        return list(zip(("up", "down"), logical.tolist(), wire.tolist(), strict=True))


def predict(config: Config, resources: Resources) -> Forecast:
    """Forecasts a run: reads the data, trains a few steps of each cohort, and writes nothing.

    Raises:
        UserError: the configuration cannot run, data is missing, or the ranks do not fit the nodes.
    """
    began = time.perf_counter()
    transport = _choose_transport(config, resources.ranks)
    ranks = lay_out(config.runtime, resources.ranks, resources.nodes, resources.gpus, resources.cores, transport)
    on_gpu = any(number is not None for number in ranks.gpu)
    experiment, process = _load_experiment(replace(config, runtime=ranks.runtime), on_gpu)
    ready = setup(experiment, ranks.count, ranks.slots)
    loading = time.perf_counter() - began
    sizes = compute_state_sizes(experiment)
    opening, rounds = _schedule_first_rounds(ready, config)
    measured = measure_cohorts(ready, rounds, sizes, on_gpu, process.resident)
    most_resident = experiment.most_resident((resources.gpu_memory or math.inf) * ranks.runtime.gpu_memory)
    on_disk = config.runtime.state == "disk"
    return Forecast(
        resources=resources,
        experiment=experiment,
        setup=ready,
        ranks=ranks,
        opening=opening,
        rounds=rounds,
        sizes=sizes,
        memory=forecast_memory(ready, ranks, rounds, sizes, measured.costs, process, on_disk, most_resident),
        disk=forecast_disk(ready, config, sizes),
        transport=transport,
        measured=measured,
        loading=loading,
    )


def _schedule_first_rounds(ready: Setup, config: Config) -> tuple[RoundSchedule, list[RoundSchedule]]:
    """The opening and the first rounds, then the first round with an evaluation if that is a later one."""
    num_rounds = min(max(_MIN_ROUNDS, config.evaluation.every), _MAX_ROUNDS)
    rounds_ahead = schedule(ready, config.evaluation, config.checkpoint, None)
    opening, *rounds = islice(rounds_ahead, 1 + num_rounds)
    if not any(plan.evaluates for plan in rounds):
        rounds += islice((plan for plan in rounds_ahead if plan.evaluates), 1)
    return opening, rounds


def _mean(rounds: Sequence[RoundSchedule], value: Callable[[RoundSchedule], Any]) -> Any:
    """Mean of a value over all rounds up to the last; those that are missing before it are like the others."""
    others = len(rounds) - 1
    weights = [*[(rounds[-1].round - 1) / max(others, 1)] * others, 1]
    return np.average([value(plan) for plan in rounds], 0, weights)


def _choose_transport(config: Config, ranks: int) -> TransportName:
    if ranks == 1:
        return "inprocess"
    if config.runtime.transport == "inprocess":
        raise ConfigError(f"--ranks {ranks} with runtime.transport = 'inprocess', which has 1; use auto")
    return "mpi" if config.runtime.transport == "mpi" else "torch"


def _load_experiment(config: Config, on_gpu: bool) -> tuple[Experiment, ProcessMemory]:
    """Prepares the experiment as the run would, on this machine's device; also returns this process's memory."""
    if not on_gpu:
        check_cpu_settings(config.training)
    files = own_memory("RssFile")  # which processes of a node share; 0 if the system does not say
    federation = load_federation(config)
    config = prepare(config, HOST, ("GPU",) if on_gpu else (), federation).config
    loaded, mapped = read_resident(), mapped_bytes(federation)
    read = min(mapped, max(own_memory("RssFile") - files, 0))  # of what is mapped
    data = data_bytes(federation)
    here = choose_device(config.runtime) if on_gpu else HOST
    fix_kernels(here, config.runtime, config.training)
    process = ProcessMemory(loaded, program=loaded - (data - mapped + read), data=data, shared=files + mapped)
    return build_experiment(config, federation, here), process


# --- seconds: the slowest rank trains and tests, and messages cross a link one by one


def message_seconds(
    moved: float, calls: float, ranks: int, nodes: int, delay: float | None, rate: float | None
) -> float | None:
    """Seconds for the bytes that leave a node over its link, and for each call's hops down a tree of the nodes.

    >>> message_seconds(moved=4e6, calls=2, ranks=4, nodes=4, delay=0.01, rate=1e6)  # 3 MB leave; 2 calls of 2 hops
    3.04
    """
    if ranks == 1:
        return 0.0
    if delay is None or rate is None:
        return None
    return moved * (nodes - 1) / nodes / rate + calls * (nodes - 1).bit_length() * delay


def compute_seconds(ranks: Ranks, cores: int, rounds: Sequence[RoundSchedule], costs: Costs) -> tuple[float, float]:
    """Mean seconds of training and of testing on the slowest rank.

    Args:
        cores: of a node.
        rounds: the first rounds of the run.
    """

    def testing(plan: RoundSchedule) -> float:
        seconds = _slowest_rank_seconds(
            ranks, cores, plan.testing, lambda group: costs.test(group).seconds + costs.validation(group)
        )
        if plan.tests_trained:
            seconds += _slowest_rank_seconds(ranks, cores, plan.training, lambda group: costs.test(group).seconds)
        return seconds + (_slowest_rank_seconds(ranks, cores, plan.unseen.groups, costs.unseen) if plan.unseen else 0.0)

    def training(plan: RoundSchedule) -> float:
        return _slowest_rank_seconds(ranks, cores, plan.training, lambda group: costs.train(group).seconds)

    return float(_mean(rounds, training)), float(_mean(rounds, testing))


def _slowest_rank_seconds(
    ranks: Ranks, cores: int, groups: list[list[ClientGroup]], cost: Callable[[ClientGroup], float]
) -> float:
    """Seconds of the slowest rank for its groups, given that busy ranks share a GPU, or a node's cores."""
    busy = Counter(device for device, of_rank in zip(ranks.device, groups, strict=True) if of_rank)
    slowest = 0.0
    for device, of_rank in zip(ranks.device, groups, strict=True):
        turns = busy[device] if device[1] is not None else busy[device] * ranks.runtime.threads / cores
        slowest = max(slowest, max(turns, 1.0) * sum(map(cost, of_rank)))
    return slowest
