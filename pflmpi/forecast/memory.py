"""Memory that each rank will need, on the host and on its GPU."""

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pflmpi import tree
from pflmpi.forecast.calibration import Calibration, Plane
from pflmpi.forecast.ranks import Ranks
from pflmpi.forecast.sizes import StateSizes
from pflmpi.messages.groups import ClientGroup, clients_of
from pflmpi.messages.kinds import ClassMeans, Own, OwnClasses
from pflmpi.run.build import Experiment
from pflmpi.runtime.schedule import RoundSchedule
from pflmpi.runtime.setup import Setup

_CONTEXT = 500 * 2**20  # bytes that CUDA itself takes of a GPU for each process; it differs little between GPUs

_PIECES = 1.25  # freed memory that is too small for what comes next stays: up to a quarter more was seen in runs


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank.

    Attributes:
        clients: how many live here.
        base: program and libraries.
        data: samples and who holds which.
        state: of the clients that live here, and of the server on rank 0.
        work: messages, copies and activations at the fullest moment of a round.
        checkpoint: rows that are waiting to be written.
        shared: of all these, what the ranks of a node have in common.
        device: on its GPU; 0 without one.
    """

    clients: int
    base: float
    data: float
    state: float
    work: float
    checkpoint: float
    shared: float
    device: float

    @property
    def total(self) -> float:
        """Bytes on the host."""
        return self.base + self.data + self.state + self.work + self.checkpoint


def rank_memory(
    experiment: Experiment,
    ready: Setup,
    ranks: Ranks,
    ahead: Sequence[RoundSchedule],
    sizes: StateSizes,
    calibrations: Mapping[int, Calibration] | None,
    base: tuple[float, float],
) -> list[RankMemory]:
    """Return what each rank needs.

    Args:
        ahead: the rounds that are looked at.
        calibrations: by cohort; None leaves activations out.
        base: bytes of a rank that has done nothing, and what of it is shared.
    """
    hosted = sizes.hosted(ready.placement)
    data, mapped = data_bytes(experiment)
    library = max((one.library for one in calibrations.values()), default=0.0) if calibrations else 0.0
    found = []
    for rank in range(ready.placement.ranks):
        on_gpu = ranks.gpu[rank] is not None
        phases = [_fullest(ready, rank, one, calibrations, on_gpu) for one in ahead]
        device = max((gpu for _, gpu in phases), default=0.0)
        computes = any(one.training[rank] or one.testing[rank] for one in ahead)
        found.append(
            RankMemory(
                clients=len(ready.placement.hosted(rank)),
                base=base[0] + (library if computes else 0.0),
                data=data,
                state=float(hosted[rank] + (sizes.server_bytes if rank == 0 else 0)),
                work=_PIECES * max((host for host, _ in phases), default=0.0),
                checkpoint=float(hosted[rank] + (sizes.server_bytes if rank == 0 else 0)),
                shared=base[1] + mapped,
                device=_CONTEXT + data + device if on_gpu else 0.0,
            )
        )
    return found


def data_bytes(experiment: Experiment) -> tuple[float, float]:
    """Return the bytes of samples, labels and indices, and what of it is mapped from a file that ranks share."""
    federation = experiment.federation
    dataset = federation.dataset
    labels = 2 * dataset.labels.nbytes + dataset.official_test.nbytes  # the pool has labels of its own
    indices = sum(part.nbytes for part in (*federation.train, *federation.test))
    return float(dataset.images.nbytes + labels + indices), float(
        dataset.images.nbytes if _mapped(dataset.images) else 0
    )


def _mapped(array: np.ndarray) -> bool:
    owner: object = array
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    return isinstance(owner, mmap.mmap)


def _fullest(
    ready: Setup,
    rank: int,
    ahead: RoundSchedule,
    calibrations: Mapping[int, Calibration] | None,
    on_gpu: bool,
) -> tuple[float, float]:
    """Return the most bytes that a round needs at one moment on the host and on the GPU, besides what stays."""
    ups = sum(_up_bytes(ready) * len(group) for group in ahead.training[rank])
    reply, packed = _reply_bytes(ready, ahead, rank)
    train, train_gpu = _calls(ready, ahead.training[rank], calibrations, "train")
    test, test_gpu = _calls(ready, ahead.testing[rank], calibrations, "test")
    if on_gpu:  # what was measured on the host, if that is all there is, stands for the GPU
        train_gpu, test_gpu = train_gpu or train, test_gpu or test
        train = test = 0.0
    folding, serving = _buffers(ahead, rank), reply + packed
    if rank == 0 and calibrations:
        folding, serving = calibrations[0].fold_memory, calibrations[0].serve_memory
    phases = (reply + ups + train, reply + ups + folding, reply + _folded(ahead, rank) + serving, reply + test)
    return max(phases), max(train_gpu, test_gpu)


def _calls(
    ready: Setup, groups: Sequence[ClientGroup], calibrations: Mapping[int, Calibration] | None, kind: str
) -> tuple[float, float]:
    """Return the most bytes of a call, on the host and on the GPU."""
    if calibrations is None:
        return 0.0, 0.0
    host = device = 0.0
    for group in groups:
        one = calibrations[int(ready.executor.cohort[group[0]])]
        planes: tuple[Plane, Plane] = (one.train_memory, one.train_device)
        work = longest_steps(ready, group)
        if kind == "test":
            planes, work = (one.test_memory, one.test_device), int(ready.num_test[group].max())
        host, device = max(host, planes[0].of(len(group), work)), max(device, planes[1].of(len(group), work))
    return host, device


def longest_steps(ready: Setup, group: ClientGroup) -> int:
    """Return the steps of the longest lane of a group."""
    samples = int(ready.executor.federation.num_train[group].max())
    return ready.task.training.num_steps(samples)


def _up_bytes(ready: Setup) -> int:
    """Return the bytes of one participant's messages before they are packed: means of all classes, held or not."""
    classes = ready.declared.holds.shape[1]
    return sum(
        kind.client_bytes(classes) if isinstance(kind, ClassMeans) else tree.num_bytes(kind.like)
        for kind in ready.declared.up.values()
    )


def _buffers(ahead: RoundSchedule, rank: int) -> float:
    """Return the bytes of what a rank sends on the way up: parts and packed, or sums and what a tree adds to them."""
    return 2.0 * sum(call.sizes[rank] for call in ahead.uplink)


def _folded(ahead: RoundSchedule, rank: int) -> float:
    """Return the bytes of what rank 0 makes of the messages; 0 for other ranks."""
    calls = ahead.uplink if rank == 0 else []
    return float(sum(sum(call.sizes) if call.operation == "gather" else call.sizes[0] / 2 for call in calls))


def _reply_bytes(ready: Setup, ahead: RoundSchedule, rank: int) -> tuple[float, float]:
    """Return the bytes of a reply as it is kept by a rank, and of its packed form; all ranks' forms on rank 0."""
    packed = sum(
        sum(call.sizes) if rank == 0 and call.operation == "scatter" else call.sizes[rank] for call in ahead.downlink
    )
    kept = 0
    for kind in ready.declared.down.values():
        rows = 1
        if isinstance(kind, Own):
            rows = len(clients_of(ahead.receiving[rank]))
        elif isinstance(kind, OwnClasses):
            rows = ready.declared.holds.shape[1]
        kept += rows * tree.num_bytes(kind.like)
    return float(kept), float(packed)
