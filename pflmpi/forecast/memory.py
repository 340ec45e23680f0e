"""Forecast of the memory of each rank, on the host and on its GPU."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pflmpi.forecast.bytes import StateSizes, pool_bytes
from pflmpi.forecast.measuring import Cost, Costs, ProcessMemory
from pflmpi.forecast.ranks import Ranks
from pflmpi.messages.traffic import Traffic
from pflmpi.runtime.devices import CUDA_CONTEXT_BYTES, GpuMessages
from pflmpi.runtime.executors.transfers import MOST_MESSAGE_BYTES
from pflmpi.runtime.round_schedule import RoundSchedule
from pflmpi.runtime.setup import Setup
from pflmpi.transports.base import SMALLEST_GPU_MESSAGE, STAGED

_PENDING_CHECKPOINTS = 3  # one is written, two wait; see `store.writer`
_FRAGMENTATION = 1.25  # runs have used up to a quarter more, because freed blocks are too small to be used again


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank."""

    clients: int  # number of clients whose state is on this rank
    base: float  # program and libraries
    data: float  # samples, and the partition
    state: float  # of the clients on this rank, and of the server on rank 0
    work: float  # messages, copies and activations at the peak of a round
    checkpoint: float  # rows that wait to be written
    shared: float  # the part of all these that the ranks of a node share
    device: float  # on its GPU, with samples, the CUDA context and NCCL; 0 without one
    nccl: float  # the part of `device` that NCCL takes at most; see `gpu_messages`

    @property
    def total(self) -> float:
        """Bytes on the host."""
        return self.base + self.data + self.state + self.work + self.checkpoint


def forecast_memory(
    setup: Setup,
    ranks: Ranks,
    rounds: Sequence[RoundSchedule],
    sizes: StateSizes,
    costs: Costs | None,
    process: ProcessMemory,
    on_disk: bool = False,
    most_resident: float = math.inf,
) -> list[RankMemory]:
    """Forecasts the memory of each rank.

    Args:
        rounds: the first rounds of the run.
        costs: None leaves activations out.
        on_disk: whether clients' state is in a memory-mapped file, whose pages the system can reclaim.
        most_resident: bytes of samples that a GPU may hold; a larger pool stays on the host, and the samples of the
            clients that are computed are copied.
    """
    library = max(cohort.library for cohort in costs.cohorts.values()) if costs else 0.0
    hosted, unwritten = sizes.at_the_end(setup), _unwritten_bytes(setup, rounds, sizes)
    up = setup.declared.returned_bytes(np.arange(setup.task.num_clients))
    federation, features = setup.executor.federation, setup.task.cached_features
    samples = np.maximum(federation.num_train, federation.num_test) * federation.dataset.images[:1].nbytes
    large = any(_has_large_parts(call) for plan in rounds for call in (*plan.uplink, *plan.downlink))
    memory = []
    for rank, gpu in enumerate(ranks.gpu):
        on_gpu, server = gpu is not None, sizes.server
        peaks = [(0.0, 0.0), *(_peak_bytes(plan, rank, up, server, costs, on_gpu) for plan in rounds)]
        work, device = (max(values) for values in zip(*peaks, strict=True))
        nccl = ranks.messages.memory(rank, len(ranks.of_node[ranks.node[rank]]), large)
        pool = pool_bytes(setup, rank)
        is_copied = pool > most_resident and not features
        in_transit = _transit_bytes(rounds, rank, up + sizes.client + (samples if is_copied else 0)) if on_gpu else 0.0
        if on_gpu:
            device += (
                CUDA_CONTEXT_BYTES + (0 if is_copied else pool) + in_transit + _sum_bytes(setup, rounds, rank) + nccl
            )
            device += _exchange_bytes(rounds, rank, ranks.messages)
            device += sum(task.frozen.num_bytes for task in setup.executor.tasks)
        computes = any(plan.training[rank] or plan.testing[rank] for plan in rounds)
        state, checkpoint = 0.0 if on_disk else float(hosted[rank]), float(unwritten[rank])
        if rank == 0:
            state, checkpoint = state + server, checkpoint + server + sizes.received
        memory.append(
            RankMemory(
                clients=len(setup.placement.hosted(rank)),
                base=process.program + (library if computes else 0.0),
                data=process.data + (pool if computes and features and not on_gpu else 0),
                state=state,
                work=_FRAGMENTATION * work + in_transit,
                checkpoint=checkpoint,
                shared=process.shared,
                device=device,
                nccl=nccl,
            )
        )
    return memory


def _transit_bytes(rounds: Sequence[RoundSchedule], rank: int, moved: np.ndarray) -> float:
    """Bytes of the groups that are copied while a GPU computes another; `moved`: [N] bytes of each client.

    See `runtime.executors.transfers`.
    """
    return 2.0 * max((float(moved[group].sum()) for plan in rounds for group in plan.training[rank]), default=0.0)


def _sum_bytes(setup: Setup, rounds: Sequence[RoundSchedule], rank: int) -> float:
    """Bytes on a GPU of the messages that are summed there, and of their sum in int64."""
    entries = setup.declared.entries
    most = max((sum(map(len, plan.training[rank])) for plan in rounds), default=0)
    return min(most * entries.size, MOST_MESSAGE_BYTES) + 8.0 * entries.count if most else 0.0


def _exchange_bytes(rounds: Sequence[RoundSchedule], rank: int, messages: GpuMessages) -> float:
    """Bytes on a GPU of what the largest call sends and receives, to be summed there or to pass through it."""
    peers = len(messages.ranks) - 1 if messages.nccl and rank in messages.ranks else 0
    calls = [(call, np.inf) for plan in rounds for call in plan.uplink]
    calls += [(call, STAGED * peers) for plan in rounds for call in plan.calls]
    return max(
        (min(float(call.sent[rank]), most) + min(float(call.received[rank]), most) for call, most in calls), default=0
    )


def _has_large_parts(call: Traffic) -> bool:
    """Whether ranks exchange parts that are large enough to go from GPU to GPU."""
    return int(call.sent.max()) >= SMALLEST_GPU_MESSAGE * (len(call.sent) - 1)


def _unwritten_bytes(setup: Setup, rounds: Sequence[RoundSchedule], sizes: StateSizes) -> np.ndarray:
    """[R] bytes of clients' rows that wait to be written, at most."""
    first = [sizes.first[setup.placement.hosted(rank)].sum() for rank in range(setup.placement.ranks)]
    later = [[_PENDING_CHECKPOINTS * sizes.client[rows].sum() for rows in plan.rows] for plan in rounds if plan.saves]
    most: np.ndarray = np.array([first, *later]).max(0)
    return most


def _peak_bytes(
    plan: RoundSchedule, rank: int, up: np.ndarray, server: int, costs: Costs | None, on_gpu: bool
) -> tuple[float, float]:
    """Peak bytes of a round on the host and on the GPU, besides the state.

    Args:
        up: [N] bytes of a client's message.
        server: bytes of the server's state.
    """
    declared = plan.setup.declared
    messages = float(sum(up[group].sum() for group in plan.training[rank]))
    reply = float(sum(call.received[rank] for call in plan.downlink))
    reply += declared.shared_bytes if rank == 0 else 0  # which others receive
    # Parts, or sums, and what is sent.
    fold, serve = sum(2.0 * call.sent[rank] + call.received[rank] for call in plan.uplink), reply
    train, test = (0.0, 0.0), (0.0, 0.0)
    if costs:
        train = _max_bytes(map(costs.train, plan.training[rank]), on_gpu)
        test = _max_bytes(map(costs.test, plan.testing[rank]), on_gpu)
    if rank == 0:  # it gathers, and holds the sums and the updated server beside the state before
        folded = float(declared.folded_bytes(plan.participants))
        fold += folded + (messages if declared.gathered and len(plan.training) > 1 else 0.0)  # its own rows twice
        serve += folded + server + sum(declared.rows_bytes(len(plan.participants), len(plan.receivers)).values())
    peak = max(messages + train[0], messages + fold, serve, test[0])
    return reply + peak, max(train[1], test[1])


def _max_bytes(calls: Iterable[Cost], on_gpu: bool) -> tuple[float, float]:
    """Bytes of the largest call on the host and on the GPU; costs measured on a CPU stand for those of a GPU."""
    costs = list(calls)
    host = max((cost.memory for cost in costs), default=0.0)
    device = max((cost.device for cost in costs), default=0.0)
    return (0.0, device or host) if on_gpu else (host, 0.0)
