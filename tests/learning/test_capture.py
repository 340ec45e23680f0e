"""Captured steps: the bits of steps that are launched operation by operation, and nothing stale in their buffers.

Without a GPU what captures is a stand-in: like a CUDA graph it runs the same operations on the same memory again, with
the numbers that they had.
"""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import small_task
import stub_device  # noqa: F401 -- a device must be there before the first backward pass of the process
import stub_run
from every_algorithm import MESSAGE_KINDS, every_algorithm
from pflmpi.learning import program, replay
from pflmpi.learning.capture import graphs, memory
from pflmpi.learning.capture.graphs import BY_DEVICE
from pflmpi.learning.client import Batch
from pflmpi.testing import conformance
from pflmpi.testing.conformance import Runs

Work = Callable[[], object]
TAKEN = 2 + 8  # steps before the first capture: two are recorded, eight are run as they are


class Recorder:
    """Captures on the host, and counts."""

    def __init__(self) -> None:
        self.captures = self.launches = 0

    def __call__(self, work: Work) -> Work:
        self.captures += 1

        def launch() -> None:
            self.launches += 1
            work()

        return launch


@pytest.fixture(autouse=True)
def _nothing_known() -> None:
    graphs.say_why_not.cache_clear()
    program._program.cache_clear()


@pytest.fixture
def graph() -> Iterator[Recorder]:
    recorder = Recorder()
    with mock.patch.dict(BY_DEVICE, {"cpu": recorder}):
        yield recorder


class Weights:
    """Steps on a weight, a view of it, an expanded tensor and a number."""

    def __init__(self, start: float = 1.0, rate: float = 0.1) -> None:
        self.weight, self.sums, self.rate = torch.full((2, 3), start), torch.zeros(2, 1), rate
        self.wide = torch.tensor([start]).expand(3)
        self.host = [torch.full((3,), start)]

    def step(self, batch: Batch) -> None:
        self.sums.add_((self.weight.t() * batch.x.mean()).sum(0).unsqueeze(1))
        self.weight[1].mul_(0.9).add_(self.wide, alpha=self.rate)
        self.weight.sub_(self.sums * self.rate + batch.y.float().mean())

    def whole_sum(self, batch: Batch) -> None:
        self.weight.sub_(batch.x.sum() * self.rate)


def passes(kind: str, runs: list[tuple[Weights, list[Batch]]]) -> None:
    """Check that passes of a kind of step, one after another, have the bits of steps that are taken one by one."""
    for weights, batches in runs:
        plain = Weights()
        plain.__dict__ |= {"rate": weights.rate, "wide": weights.wide, "weight": weights.weight.clone()}
        steps = replay.Steps(getattr(weights, kind), f"{kind}", len(batches))
        for batch in batches:
            getattr(plain, kind)(batch)
            steps.take(batch)
        steps.end()
        assert torch.equal(weights.weight, plain.weight) and torch.equal(weights.sums, plain.sums)


def batches(count: int, first: int = 0, size: int = 6) -> list[Batch]:
    return [small_task.batch(first + seed, size) for seed in range(count)]


def test_a_captured_pass_has_the_bits_of_its_steps(graph: Recorder) -> None:
    passes("step", [(Weights(), batches(30))])
    assert (graph.captures, graph.launches) == (1, 30 - TAKEN)


def test_the_next_pass_goes_on_from_its_own_tensors(graph: Recorder) -> None:
    passes("step", [(Weights(), batches(30)), (Weights(2.0), batches(20, 50)), (Weights(3.0), batches(20, 90))])
    assert (graph.captures, graph.launches) == (1, 30 - TAKEN + 2 * (20 - 1)), "the one capture serves all passes"


def test_another_number_is_captured_anew(graph: Recorder) -> None:
    passes("step", [(Weights(), batches(30)), (Weights(rate=0.2), batches(30)), (Weights(rate=0.3), batches(9))])
    assert graph.captures == 2


def test_batches_of_two_forms_share_what_is_kept(graph: Recorder) -> None:
    mixed = [batch for pair in zip(batches(40), batches(40, 50, size=4), strict=True) for batch in pair]
    passes("step", [(Weights(), mixed), (Weights(2.0), mixed)])
    assert graph.captures == 2 and graph.launches > 40


def test_a_short_pass_is_not_captured(graph: Recorder) -> None:
    passes("step", [(Weights(), batches(TAKEN))])
    assert graph.captures == 0


@pytest.mark.parametrize("wrong", ["raises", "does nothing", "is stale"])
def test_a_capture_that_goes_wrong_is_not_used_and_said_once(wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    def raises(work: Work) -> Work:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    def is_stale(work: Work) -> Work:
        return lambda: [work(), work()]

    capture = {"raises": raises, "does nothing": lambda work: lambda: None, "is stale": is_stale}[wrong]
    with caplog.at_level(logging.WARNING), mock.patch.dict(BY_DEVICE, {"cpu": capture}):
        passes("whole_sum", [(Weights(), batches(40)), (Weights(2.0), batches(40))])
    said = [record.message for record in caplog.records]
    assert len(said) == 1 and said[0].startswith("a training step is not captured in a CUDA graph")
    assert said[0].endswith("operation not permitted when stream is capturing" if wrong == "raises" else "other bits")


def test_what_cannot_be_captured_is_said_once(graph: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    total = torch.zeros(())

    def looks(batch: Batch) -> None:
        total.add_(1.0 if float(batch.x.mean()) > 0 else 2.0)

    for _ in range(2):
        steps = replay.Steps(looks, "looks", 30)
        for batch in batches(30):
            steps.take(batch)
    assert graph.captures == 0
    assert [record.message.rpartition(": ")[2] for record in caplog.records] == [
        "it looks at values, or is another one each time"
    ]


def test_tensors_that_overlap_are_copied_together() -> None:
    whole = torch.arange(24.0)
    values: list[Any] = [whole[4:10].view(2, 3).t(), 0.5, whole[8:12], whole[20:], whole[:1].expand(3), torch.ones(0)]
    stretches = memory.stretches(values)
    assert [(stretch.flat.tolist(), stretch.places) for stretch in stretches] == [
        ([4, 5, 6, 7, 8, 9, 10, 11], ((0, 0), (2, 4))),
        ([20, 21, 22, 23], ((3, 0),)),
        ([0], ((4, 0),)),
        ([], ((5, 0),)),
    ]
    flat, own = memory.copy_of(stretches, values)
    memory.copy(flat, [stretch.flat for stretch in stretches])
    assert own[1] == 0.5 and all(torch.equal(own[place], values[place]) for place in (0, 2, 3, 4, 5))
    assert [one.stride() for one in own if isinstance(one, Tensor)] == [(1, 3), (1,), (1,), (0,), (1,)]
    own[0].t()[1, 2] = 7
    assert own[2].tolist() == [8, 7, 10, 11] and whole[9] == 9, "they overlap alike, and are not the others"
    assert not memory.same_bits(flat, [stretch.flat for stretch in stretches])
    assert memory.stretches([whole, whole.view(torch.int32)])[0].mixed


def test_a_capture_of_another_layout_is_another_one(graph: Recorder) -> None:
    apart, together = Weights(), Weights()
    together.wide = together.weight[0]  # read where the step writes
    passes_of = [(apart, batches(30)), (Weights(2.0), batches(30))]
    passes("step", passes_of)
    plain = Weights()
    plain.wide = plain.weight[0]
    steps = replay.Steps(together.step, "step", 30)
    for batch in batches(30):
        plain.step(batch)
        steps.take(batch)
    steps.end()
    assert torch.equal(together.weight, plain.weight) and graph.captures == 2


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[] if one == "fedgmh-full" else [pytest.mark.slow]) for one in every_algorithm()]
)
def test_an_algorithm_captured_gives_the_same_bits(name: str, graph: Recorder, tmp_path: Path) -> None:
    conformance.replayed_steps_are_the_steps(Runs(every_algorithm()[name], tmp_path))
    assert graph.launches or name not in MESSAGE_KINDS


@pytest.mark.parametrize(
    ("case", "model", "executor"),
    [
        ("fedgmh-full", "mlp", "lanes"),
        pytest.param("fedproto", "cnn", "loop", marks=pytest.mark.slow),
        pytest.param("fedavg", "resnet18", "loop", marks=pytest.mark.slow),
    ],
)
def test_a_device_launches_captured_steps_without_waits_and_copies(case: str, model: str, executor: str) -> None:
    recorder, raw = Recorder(), stub_run.settings(every_algorithm()[case], model, executor, steps=20)
    with mock.patch.dict(BY_DEVICE, {"stub": recorder}):
        found = stub_run.run(raw, True)
    plain = stub_run.run(raw, True)
    for path, leaf in plain.values.items():
        torch.testing.assert_close(found.values[path], leaf, rtol=0, atol=0)
    mine, theirs = found.counts["update"], plain.counts["update"]
    recorded = 3  # the first step is unlike the others: it makes the one that the backward passes begin with
    assert recorder.launches >= 20 - recorded - 8 and recorder.captures >= 1
    assert (mine.uploads, mine.downloads) == (theirs.uploads, theirs.downloads)
    assert mine.syncs == theirs.syncs + recorder.captures, "a capture is compared once"
