"""All that is foreseen of a run, from its configuration and the machines that it is to run on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from pflmpi.config.load import Config
from pflmpi.errors import ConfigError
from pflmpi.forecast.communication import Link, Network, wire_bytes
from pflmpi.forecast.disk import Disk, disk
from pflmpi.forecast.measuring import Found, calls_found, link_found
from pflmpi.forecast.memory import RankMemory, rank_memory
from pflmpi.forecast.ranks import Ranks, lay_out
from pflmpi.forecast.seconds import Seconds, seconds
from pflmpi.forecast.sizes import StateSizes, state_sizes
from pflmpi.forecast.stopwatch import resident, shared
from pflmpi.learning.task import HOST
from pflmpi.run.build import Experiment, assemble, load_federation, setup
from pflmpi.runtime.devices import choose, fix_kernels
from pflmpi.runtime.schedule import RoundSchedule, schedule
from pflmpi.runtime.setup import Setup
from pflmpi.transports.detect import ALONE, Launch

_LEAST, _MOST = 20, 200  # rounds that are looked at, so that one with an evaluation is among them


@dataclass(frozen=True)
class Question:
    """What is to be planned for.

    Attributes:
        ranks, nodes: how many.
        gpus, cores: of each node.
        memory, gpu_memory: bytes of a node and of a GPU; None where it is not known.
        delay: seconds between nodes, one way; None for as within a node.
        rate: bytes per second between nodes; None for as within a node.
        folder: of the stored measurements.
        anew: measure again what is stored.
        worker: the module with which two ranks time their link.
    """

    ranks: int
    nodes: int
    gpus: int
    cores: int
    memory: int
    gpu_memory: int | None
    delay: float | None
    rate: float | None
    folder: Path
    anew: bool
    worker: str


@dataclass(frozen=True)
class Forecast:
    """What is foreseen.

    Attributes:
        question: what was asked.
        experiment, ready, ranks: what would run, and where.
        opening, ahead: what precedes the first round, and the first rounds.
        sizes: of the state.
        memory: of each rank.
        disk: what checkpoints take.
        seconds: of a round; None where nothing could be measured.
        transport: the one that is reckoned with.
        measured: what the machine was found to be, and remarks on it.
    """

    question: Question
    experiment: Experiment
    ready: Setup
    ranks: Ranks
    opening: RoundSchedule
    ahead: Sequence[RoundSchedule]
    sizes: StateSizes
    memory: list[RankMemory]
    disk: Disk
    seconds: Seconds | None
    transport: Literal["inprocess", "mpi", "torch"]
    measured: Found

    @property
    def gpu_memory(self) -> float | None:
        """Bytes of a GPU that the run may take; None where they are not known."""
        whole = self.question.gpu_memory
        return None if whole is None else whole * self.ranks.runtime.gpu_memory

    def bytes_per_round(self) -> list[tuple[str, float, float]]:
        """For each way its name, logical bytes and bytes between ranks: the mean of the rounds ahead."""
        if not self.ahead:
            return [("up", 0.0, 0.0), ("down", 0.0, 0.0)]
        logical = np.array([(one.up_bytes.sum(), one.down_bytes.sum()) for one in self.ahead]).sum(0) / len(self.ahead)
        moved = [wire_bytes([*one.uplink, *one.downlink], self.transport) for one in (self.opening, *self.ahead)]
        wire = np.array(moved).sum(0) / len(self.ahead)
        return list(zip(("up", "down"), logical.tolist(), wire.tolist(), strict=True))


def foresee(config: Config, question: Question) -> Forecast:
    """Return what is foreseen; the data is read, nothing is trained but what the measurements need.

    Raises:
        UserError: a configuration that cannot run, data that is not there, ranks that do not fit the nodes.
    """
    base = float(resident()), float(shared())
    transport = _transport(config, question.ranks)
    ranks = lay_out(config.runtime, question.ranks, question.nodes, question.gpus, question.cores)
    on_gpu = any(number is not None for number in ranks.gpu)
    if not on_gpu:
        choose(config.runtime.model_copy(update={"device": "cpu"}), config.training, ALONE)  # refuses what needs a GPU
    config = replace(config, runtime=ranks.runtime)
    federation = load_federation(config)
    decided = assemble(config, federation, torch.device("cuda" if on_gpu else "cpu")).config
    here = torch.device("cuda", 0) if on_gpu and torch.cuda.is_available() else HOST
    fix_kernels(here, decided.runtime, decided.training)
    experiment = assemble(decided, federation, here)
    ready = setup(experiment, Launch("mpi", 0, ranks.count, 0, len(ranks.of_node(0))), ranks.slots)
    sizes = state_sizes(experiment)
    looked_at = min(max(_LEAST, decided.evaluation.every), _MOST)
    opening, *ahead = islice(schedule(ready, None), 1 + looked_at)
    measured = Found(None, "")
    if ahead:
        measured = calls_found(experiment, ready, ahead, sizes, on_gpu, question.folder, question.anew, base[0])
    if question.ranks > 1:
        measured = link_found(measured, question.worker, question.folder, question.anew)
        base = measured.base or base
    network = _network(question, measured.link)
    written = disk(experiment, ready)
    predicted = None
    if measured.calibrations is not None:
        predicted = seconds(
            ready, ranks, question.cores, ahead, measured.calibrations, network, transport, written.seconds
        )
    memory = rank_memory(experiment, ready, ranks, ahead, sizes, measured.calibrations, base)
    return Forecast(
        question, experiment, ready, ranks, opening, ahead, sizes, memory, written, predicted, transport, measured
    )


def _transport(config: Config, ranks: int) -> Literal["inprocess", "mpi", "torch"]:
    if ranks == 1:
        return "inprocess"
    if config.runtime.transport == "inprocess":
        raise ConfigError(f"--ranks {ranks} with runtime.transport = 'inprocess', which has 1; use auto")
    return "mpi" if config.runtime.transport == "mpi" else "torch"


def _network(question: Question, within: Link | None) -> Network | None:
    if within is None:
        return None
    delay = within.delay if question.delay is None else question.delay
    rate = within.rate if question.rate is None else question.rate
    return Network(question.ranks, question.nodes, within, Link(delay, rate))
