"""What `plan` counts for a GPU besides the group that it computes."""

from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest

import quick_run
from pflmpi import tree
from pflmpi.forecast import memory
from pflmpi.forecast.bytes import compute_state_sizes, pool_bytes
from pflmpi.forecast.measuring import ProcessMemory
from pflmpi.forecast.memory import forecast_memory
from pflmpi.forecast.ranks import lay_out
from pflmpi.learning.task import HOST
from pflmpi.messages.traffic import Traffic
from pflmpi.runtime.devices import CUDA_CONTEXT_BYTES, GpuMessages
from pflmpi.runtime.executors.batches import Pool
from planned_run import planned


def of_one_rank(world, gpus):
    laid_out = lay_out(world.experiment.config.runtime, 1, 1, gpus, 2)
    _, *rounds = world.schedule()
    return forecast_memory(
        world.setup, laid_out, rounds, compute_state_sizes(world.experiment), None, ProcessMemory(0, 0, 0, 0)
    )[0]


@pytest.mark.parametrize(("algorithm", "kept"), [("fedavg", 0), ("ditto", 1)])  # models that a client keeps
def test_other_groups_are_on_their_way_and_messages_wait_to_be_summed(algorithm, kept):
    raw = quick_run.settings(algorithm={"name": algorithm}, runtime={"executor": "loop", "device": "auto"})
    raw["evaluation"] = {"absent": "latest"}  # so that no reply is kept
    world = planned(raw, 1)
    on_gpu, on_cpu, model = of_one_rank(world, 1), of_one_rank(world, 0), tree.num_bytes(world.setup.task.like())
    summed = 3 * model + 8 * model // 4  # of three participants, and the sum in int64
    beside = on_gpu.device - CUDA_CONTEXT_BYTES - pool_bytes(world.setup, 0)
    assert (beside, on_cpu.device) == (2 * (1 + kept) * model + summed, 0)
    with mock.patch.object(memory, "MOST_MESSAGE_BYTES", 2 * model):
        assert of_one_rank(world, 1).device == on_gpu.device - model
    assert on_gpu.work - on_cpu.work == 2 * (1 + kept) * model, "in pinned memory of the host"
    frozen = planned({**raw, "model": {**raw["model"], "trainable": ["head.*"]}}, 1)
    head = tree.num_bytes(frozen.setup.task.like())
    assert of_one_rank(frozen, 1).device - CUDA_CONTEXT_BYTES - pool_bytes(world.setup, 0) == (
        (2 * (1 + kept) + 3 + 8 // 4) * head + model - head
    ), "what is frozen once, and only what is trained in messages"


@pytest.mark.parametrize("algorithm", ["fedavg", "ditto"])
def test_the_samples_of_its_clients_are_on_the_gpu_of_a_rank(algorithm):
    raw = quick_run.settings(algorithm={"name": algorithm}, runtime={"device": "auto"})
    world = planned(raw, 2)
    laid_out, (_, *rounds) = lay_out(world.experiment.config.runtime, 2, 1, 2, 2), world.schedule()
    args = world.setup, laid_out, rounds, compute_state_sizes(world.experiment), None, ProcessMemory(0, 0, 0, 0)
    with_samples = [rank_memory.device for rank_memory in forecast_memory(*args)]
    with mock.patch.object(memory, "pool_bytes", lambda *_: 0):
        without = [rank_memory.device for rank_memory in forecast_memory(*args)]
    dataset = world.experiment.federation.dataset
    for rank, more in enumerate(np.subtract(with_samples, without)):
        samples = world.setup.samples(rank)
        pool = Pool.of(dataset, HOST) if samples is None else Pool.of_some(dataset, HOST, samples)
        assert more == pool.images.nbytes + pool.labels.nbytes
        assert (samples is None) == (algorithm == "fedavg")


@pytest.mark.parametrize(("nccl", "rank", "expected"), [(True, 1, 60), (True, 2, 100), (True, 0, 40), (False, 2, 9)])
def test_what_is_summed_on_a_gpu_or_passes_through_it_counts(nccl, rank, expected, monkeypatch):
    """Three ranks, of which two have a GPU: of a peer at most 30 bytes each way pass through it at a time."""
    monkeypatch.setattr(memory, "STAGED", 30)
    up, down = (
        Traffic(np.array([40, 60, 4]), np.array([0, 0, 5]), False),
        Traffic(np.array([0, 1, 90]), np.array([9, 1, 40]), True),
    )
    plan = cast(Any, SimpleNamespace(uplink=[up], calls=[up, down]))
    assert memory._exchange_bytes([plan], rank, GpuMessages((1, 2, 3) if nccl else (), "", nccl)) == expected


def test_a_rank_counts_what_its_gpu_sums():
    world = planned(quick_run.settings(runtime={"device": "auto"}), 2)
    laid_out, (_, *rounds) = lay_out(world.experiment.config.runtime, 2, 1, 2, 2), world.schedule()
    args = world.setup, laid_out, rounds, compute_state_sizes(world.experiment), None, ProcessMemory(0, 0, 0, 0)
    with_sums = forecast_memory(*args)
    with mock.patch.object(memory, "_exchange_bytes", lambda *_: 0.0):
        without = forecast_memory(*args)
    for rank, (with_sum, none) in enumerate(zip(with_sums, without, strict=True)):
        most = max(call.sent[rank] + call.received[rank] for plan in rounds for call in plan.uplink)
        assert with_sum.device - none.device >= most > 0
