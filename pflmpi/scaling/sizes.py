"""Rounds on any number of ranks as their schedule has them: clients of a rank, bytes, delays. Nothing is trained."""

import re
from collections.abc import Callable
from functools import cache
from math import inf

import numpy as np

from pflmpi import outside
from pflmpi.config.load import parse
from pflmpi.data.federation import Federation, take
from pflmpi.errors import ConfigError, UserError
from pflmpi.experiment.build import assemble, load_federation, setup
from pflmpi.forecast.bytes import wire_bytes
from pflmpi.forecast.communication import Link, Network, TransportName, communication_seconds
from pflmpi.learning.task import HOST
from pflmpi.runtime.round_schedule import RoundSchedule
from pflmpi.runtime.schedule import schedule
from pflmpi.scaling.experiment import WARM_UP, Scaling
from pflmpi.scaling.model import Size
from pflmpi.scaling.records import Record
from pflmpi.scaling.results import Results

_DELAYS, _BYTES = Link(1.0, inf), Link(0.0, 1.0)  # seconds over these are delays, or bytes, one after the other


def sizes(results: Results) -> Callable[[int], Size]:
    """What a round is on a number of ranks, the mean of the rounds that count.

    Clients beyond those that were measured, in weak mode, are like these again. Beyond the measured numbers each rank
    has a core or a GPU of its own; where one machine was measured, each has a machine of its own.

    Raises:
        ConfigError: the data or the code of the runs is not there.
    """
    scaling, last = results.scaling, results.measured[-1]
    record = last.runs[-1].record
    computed_on = ("GPU",) if gpus_of(record) else ()
    nodes = int(record.get("nodes", 1))
    per_node = -(-last.ranks // nodes) if nodes > 1 else 1  # beyond what was measured, too
    measured_slots = _slots(record, scaling.threads(last.ranks))
    transport: TransportName = "mpi" if record.get("transport") == "mpi" else "torch"
    try:
        with outside.as_config_error():
            federation = load_federation(parse(scaling.raw(scaling.base)))
    except UserError as error:
        needs = "--to counts the messages, for which it needs what the runs were made with"
        raise ConfigError(f"{needs}: {error}") from error

    @cache
    def of(ranks: int) -> Size:
        clients = _enlarged(federation, scaling, ranks)
        experiment = assemble(parse(scaling.raw(ranks)), clients, HOST, computed_on)
        there = measured_slots * (-(-ranks // per_node) if nodes > 1 else 1)
        _, *rounds = schedule(setup(experiment, ranks, there if ranks <= last.ranks else ranks), None)
        network = [Network(ranks, -(-ranks // per_node), link, link) for link in (_DELAYS, _BYTES)]
        return _mean(ranks, rounds[WARM_UP:], network, transport)

    return of


def _slots(record: Record, threads: int) -> int:
    """How many ranks can compute at once on a node that was measured."""
    return gpus_of(record) or max(int(record["cores"]) // threads, 1)


def gpus_of(record: Record) -> int:
    """GPUs of a node that a run computed on; 0 on CPUs, also of a machine that has GPUs.

    >>> gpus_of({"device": "H100", "gpus": "2 H100"}), gpus_of({"device": "x86_64", "gpus": "2 H100"})
    (2, 0)
    """
    known = re.findall(r"(\d+) ([^,]+)", record.get("gpus", ""))
    return sum(int(count) for count, model in known if model in record["device"])


def _enlarged(federation: Federation, scaling: Scaling, ranks: int) -> Federation:
    """The clients for so many ranks: those of the first number again, where they grow with the ranks."""
    if scaling.mode != "weak":
        return federation
    num_clients = federation.num_clients
    return take(federation, np.arange(max(num_clients * ranks // scaling.base, 1)) % num_clients)


def _mean(ranks: int, rounds: list[RoundSchedule], network: list[Network], transport: TransportName) -> Size:
    computing = [sum(map(bool, one.training)) for one in rounds]
    clients = [len(one.participants) / count for one, count in zip(rounds, computing, strict=True) if count]
    delays, path = ([communication_seconds(one.calls, each, transport) for one in rounds] for each in network)
    moved = [sum(wire_bytes([*one.uplink, *one.downlink], transport)) for one in rounds]
    means = [float(np.mean(values or [0.0])) for values in (clients, delays, path, moved)]
    return Size(ranks, *means)
