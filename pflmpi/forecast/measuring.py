"""Measures seconds and memory of a few real steps of each cohort, in this process."""

import contextlib
import ctypes
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from pflmpi import machine, tree
from pflmpi.algorithms.base import initial_client, initial_received
from pflmpi.forecast.bytes import StateSizes
from pflmpi.learning.task import HOST
from pflmpi.machine import own_memory
from pflmpi.messages.downlink import Homes, send_down
from pflmpi.messages.groups import ClientGroup
from pflmpi.messages.kinds import Messages
from pflmpi.runtime import evaluation
from pflmpi.runtime.round_schedule import RoundSchedule
from pflmpi.runtime.setup import Setup
from pflmpi.transports.inprocess import InProcessTransport
from pflmpi.tree import Tree

_REPEATS = 3
_LONG_SECONDS = 2.0  # seconds; a longer call is made once


@dataclass(frozen=True)
class Cost:
    seconds: float  # median of a few calls, after one that warms up
    memory: float  # bytes of the host, besides those in use before
    device: float  # likewise bytes of the GPU; 0 on a CPU


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes of a process that has loaded the data and computed nothing."""

    resident: int  # all of it
    program: int  # all but the data
    data: int  # samples, and the partition
    shared: int  # the part of it that processes of a node share


def measure_call(call: Callable[[], object], device: torch.device) -> Cost:
    host, on_gpu = _reset_peaks(device)
    first = _time_call(call, device)
    times = [_time_call(call, device) for _ in range(_REPEATS if first < _LONG_SECONDS else 0)]
    peak = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
    return Cost(statistics.median(times or [first]), max(own_memory("VmHWM") - host, 0), peak - on_gpu)


def read_resident() -> int:
    """Resident bytes of this process; its peak where the system does not say."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # free memory goes back to the system
    return own_memory("VmRSS") or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _reset_peaks(device: torch.device) -> tuple[int, int]:
    """Resets the peaks; returns the bytes in use on the host and on the GPU."""
    host = read_resident()
    with contextlib.suppress(OSError):  # the peak is then that of the whole process, which is more
        Path("/proc/self/clear_refs").write_text("5")
    if device.type != "cuda":
        return host, 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return host, torch.cuda.memory_reserved(device)


def _time_call(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, to its end; on a CPU those of this thread, so that other processes do not count."""
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    began = clock()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - began


_SHORT_STEPS, _LONG_STEPS = 2, 6  # steps of the two measured trainings, whose difference gives the cost of a step


@dataclass(frozen=True)
class CohortCost:
    """Cost of a call of the executor for clients of one cohort."""

    lanes: int  # clients in the measured call
    train: Cost  # of a training without its steps; its memory is that of `_SHORT_STEPS`
    step: float  # seconds of a step
    test: Cost
    tests: int  # samples of a client in that test
    library: float = 0.0  # bytes that the first call loads, and that stay


@dataclass(frozen=True)
class Costs:
    """Cost of each group of clients on this machine."""

    setup: Setup
    cohorts: Mapping[int, CohortCost]

    def train(self, group: ClientGroup) -> Cost:
        cost = self._cohort(group)
        return _scale(cost.train, cost.train.seconds + cost.step * self._steps(group), len(group) / cost.lanes)

    def test(self, group: ClientGroup) -> Cost:
        """Cost of a test, with the adaptation before it."""
        cost, executor = self._cohort(group), self.setup.executor
        adaptation = cost.step * self._steps(group) if executor.adapts else 0.0
        seconds = cost.test.seconds * int(executor.federation.num_test[group].max()) / cost.tests + adaptation
        return _scale(cost.test, seconds, len(group) / cost.lanes)

    def validation(self, group: ClientGroup) -> float:
        """Seconds of a test on validation samples; 0 where there are none."""
        if (executor := self.setup.validation) is None:
            return 0.0
        return replace(self, setup=replace(self.setup, executor=executor)).test(group).seconds

    def unseen(self, group: ClientGroup) -> float:
        """Seconds of a test of unseen clients, with the training before it."""
        unseen = self.setup.unseen
        assert unseen is not None
        costs = replace(self, setup=replace(self.setup, executor=unseen.executor))
        return unseen.updates * costs.train(group).seconds + costs.test(group).seconds

    def _cohort(self, group: ClientGroup) -> CohortCost:
        return self.cohorts[int(self.setup.executor.cohort[group[0]])]

    def _steps(self, group: ClientGroup) -> int:
        return self.setup.task.training.num_steps(int(self.setup.executor.federation.num_train[group].max()))


@dataclass(frozen=True)
class Measurement:
    """Costs measured on this machine."""

    costs: Costs | None = None  # None where they could not be measured
    device: str = ""  # what they were measured on
    remarks: tuple[str, ...] = ()  # caveats for the user


def measure_cohorts(
    setup: Setup, rounds: Sequence[RoundSchedule], sizes: StateSizes, on_gpu: bool, before: float
) -> Measurement:
    """Measures the costs of all cohorts on the device of the experiment; takes a few seconds.

    Args:
        on_gpu: whether ranks compute on GPUs; steps on this CPU stand for theirs if there is none here.
        before: bytes of this process before anything was computed.
    """
    if not rounds:
        return Measurement()
    groups = [_largest_group(setup, rounds, cohort) for cohort in range(len(setup.executor.tasks))]
    needed = 2 * sizes.server + 4 * max(map(len, groups)) * int(sizes.client.max())
    if needed > machine.memory().free / 2:
        needs = "measuring them needs more memory than there is here"
        return Measurement(remarks=(f"seconds and activations are not predicted: {needs}",))
    device = setup.executor.tasks[0].device
    remarks: tuple[str, ...] = ()
    if on_gpu and device.type == "cpu":
        remarks = (
            "there is no GPU here: seconds and memory of calls are those of this machine's CPU; run this where a GPU "
            "is (srun --gpus=1 pflmpi plan ...)",
        )
    server = setup.algorithm.init_server(setup.task)
    costs = {cohort: _measure_cohort(setup, server, group, before) for cohort, group in enumerate(groups)}
    return Measurement(Costs(setup, costs), machine.device_name(device), remarks)


def _measure_cohort(setup: Setup, server: Tree, group: ClientGroup, before: float) -> CohortCost:
    """Measures the cost of a group, by two trainings of a few steps and a test."""
    executor, device = setup.executor, setup.executor.device
    members = executor.cohort == executor.cohort[group[0]]
    federation = executor.federation
    samples, tests = int(federation.num_train[members].max()), max(int(federation.num_test[members].max()), 1)
    width = min(setup.task.training.batch_size, samples)
    states, train_short, test_once = _make_trial(setup, server, group, _SHORT_STEPS, width, tests)
    _, train_long, _ = _make_trial(setup, server, group, _LONG_STEPS, width, tests)
    measure_call(train_short, device)
    measure_call(test_once, device)
    library = max(read_resident() - before - tree.num_bytes(states) - tree.num_bytes(server), 0)
    short, test = measure_call(train_short, device), measure_call(test_once, device)
    step = max(measure_call(train_long, device).seconds - short.seconds, 0.0) / (_LONG_STEPS - _SHORT_STEPS)
    train = replace(short, seconds=max(short.seconds - _SHORT_STEPS * step, 0.0))
    return CohortCost(len(group), train, step, test, tests, library)


def _make_trial(
    setup: Setup, server: Tree, clients: np.ndarray, steps: int, width: int, tests: int
) -> tuple[Tree, Callable[[], object], Callable[[], object]]:
    """Returns the states of a group, and calls that train it for `steps` and test it on `tests` samples a client."""
    training, algorithm, task = setup.task.training, setup.algorithm, setup.task
    if training.steps is not None:
        training = training.model_copy(update={"steps": steps})
    elif training.epochs is not None:
        training = training.model_copy(update={"epochs": 1})
    train, test = list(setup.executor.federation.train), list(setup.executor.federation.test)
    for client in clients:
        train[client] = np.resize(train[client], steps * width)
        test[client] = np.resize(test[client] if len(test[client]) else train[client], tests)
    executor = replace(
        setup.executor,
        federation=replace(setup.executor.federation, train=tuple(train), test=tuple(test)),
        tasks=tuple(task.replace(training=training) for task in setup.executor.tasks),
    )
    host = executor.task(clients).replace(device=HOST)
    states = tree.stack([initial_client(algorithm, host, int(client)) for client in clients])
    published, homes = algorithm.publish(task, server, clients), Homes(np.zeros(task.num_clients, np.int64), _zero_rows)
    reply = send_down(InProcessTransport(), setup.declared, published, [[clients]], homes=homes)
    received: list[Tree] = [{**initial_received(algorithm, task, int(client))} for client in clients]
    down: Messages = {**reply.for_clients(clients), **tree.stack(received)}  # type: ignore[dict-item]

    def test_once() -> object:
        read = {name: value for name, value in down.items() if name in algorithm.predicts_with}
        if not setup.shares_model:
            return executor.evaluate(clients, states, read, 1)()
        shared = {name: tree.row(message, 0) for name, message in read.items()}
        return evaluation.evaluate_together(executor, clients, shared, 1)()

    return states, lambda: executor.update(clients, states, down, 1)(), test_once


def _zero_rows(name: str, like: Tree, clients: np.ndarray) -> Tree:
    """Zeros in place of rows that clients keep; see `Homes`."""
    return tree.map(lambda leaf: torch.zeros(len(clients), *leaf.shape, dtype=leaf.dtype), like)


def _largest_group(setup: Setup, rounds: Sequence[RoundSchedule], cohort: int) -> ClientGroup:
    """The largest group of a cohort that is computed in one call."""
    computed = (group for plan in rounds for groups in (*plan.training, *plan.testing) for group in groups)
    groups = chain(computed, chain.from_iterable(setup.placement.assign(np.arange(setup.task.num_clients))))
    return max((group for group in groups if setup.executor.cohort[group[0]] == cohort), key=len)


def _scale(cost: Cost, seconds: float, share: float) -> Cost:
    return Cost(seconds * share, cost.memory * share, cost.device * share)
