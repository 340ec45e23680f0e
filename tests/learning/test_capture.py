"""Captured steps: the bits of steps that are launched operation by operation, and nothing stale in their buffers.

Without a GPU what captures is a stand-in: like a CUDA graph it runs the same operations on the same memory again, with
the numbers that they had.
"""

import contextlib
import gc
import logging
from collections.abc import Callable
from unittest import mock

import pytest
import torch

import quick_run
import small_task
import stub_device  # noqa: F401 -- a device must be there before the first backward pass of the process
import stub_run
from every_algorithm import LOSSES, every_algorithm
from pflmpi.learning import cuda_graphs, replay
from pflmpi.learning.client import Batch
from pflmpi.learning.cuda_graphs import BY_DEVICE
from pflmpi.testing import conformance
from pflmpi.testing.conformance import Runs

Work = Callable[[], object]
TRACED = 2  # steps of a kind before the first capture


class Recorder:
    """Captures on the host, and counts."""

    def __init__(self) -> None:
        self.captures = self.launches = 0

    def __call__(self, work: Work) -> Work:
        self.captures += 1

        def launch():
            self.launches += 1
            work()

        return launch


@pytest.fixture(autouse=True)
def _nothing_known():
    for cache in (cuda_graphs.warn_not_captured, replay._traces, replay._static_buffers):
        cache.cache_clear()


@pytest.fixture
def graph():
    recorder = Recorder()
    with mock.patch.dict(BY_DEVICE, {"cpu": recorder}):
        yield recorder


class Weights:
    """Steps on a weight, a view of it, sums, and a tensor that they only read."""

    def __init__(self, start: float = 1.0) -> None:
        self.weight, self.sums = torch.full((2, 3), start), torch.zeros(2, 1)
        self.read = torch.full((3,), start)

    def step(self, batch: Batch) -> None:
        self.sums.add_((self.weight.t() * batch.x.mean()).sum(0).unsqueeze(1))
        self.weight[1].mul_(0.9).add_(self.read, alpha=0.1)
        self.weight.sub_(self.sums * 0.1 + batch.y.float().mean())

    def looks(self, batch: Batch) -> None:
        self.sums.add_(1.0 if float(batch.x.mean()) > 0 else 2.0)


def passes(runs, name="step"):
    """Checks that passes, one after another, have the bits of steps that are taken one by one."""
    for weights, batches in runs:
        plain = Weights()
        plain.__dict__ |= {"read": weights.read, "weight": weights.weight.clone()}
        state = [weights.weight, weights.sums, weights.read]
        steps = replay.Steps(getattr(weights, name), name, state, 2, ())
        for batch in batches:
            getattr(plain, name)(batch)
            steps.take(batch)
        steps.end()
        assert torch.equal(weights.weight, plain.weight) and torch.equal(weights.sums, plain.sums)


def batches(count, first=0, size=6):
    return [small_task.batch(first + seed, size) for seed in range(count)]


def test_steps_are_captured_once_for_all_passes_which_go_on_from_their_own_state(graph):
    passes([(Weights(), batches(30))])
    assert (graph.captures, graph.launches) == (1, 30 - TRACED)
    passes([(Weights(2.0), batches(20, 50)), (Weights(3.0), batches(1, 90))])
    assert (graph.captures, graph.launches) == (1, 30 - TRACED + 20 + 1)


def test_a_pass_that_an_error_has_ended_leaves_nothing_to_the_next(graph):
    passes([(Weights(), batches(5))])
    ended = Weights(9.0)
    steps = replay.Steps(ended.step, "step", [ended.weight, ended.sums, ended.read], 2, ())
    steps.take(batches(1)[0])  # and no end
    passes([(Weights(2.0), batches(5, 50))])
    assert graph.captures == 1


def test_batches_of_two_forms_share_the_state(graph):
    mixed = [batch for pair in zip(batches(10), batches(10, 50, size=4), strict=True) for batch in pair]
    passes([(Weights(), mixed), (Weights(2.0), mixed)])
    assert graph.captures == 2 and graph.launches == 2 * 20 - 2 * TRACED


def test_a_learning_rate_that_falls_is_not_captured_anew(graph, tmp_path):
    decay = {"rounds": 4, "lr_decay": 0.9, "momentum": 0.5}
    raw = quick_run.settings({"algorithm": {"name": "fedavg"}}, training=decay, runtime={"executor": "lanes"})
    captured, captures = quick_run.run(raw, tmp_path / "captured", 1), graph.captures
    with replay.without_replay():
        assert captured == quick_run.run(raw, tmp_path / "plain", 1)
    raw["training"] |= {"lr_decay": 1.0}
    assert captured != quick_run.run(raw, tmp_path / "constant", 1) and graph.captures == 2 * captures


@pytest.mark.parametrize("wrong", ["raises", "does nothing", "is stale"])
def test_a_capture_that_goes_wrong_is_not_used_and_said_once(wrong, caplog):
    def raises(work):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    def is_stale(work):
        return lambda: [work(), work()]

    capture = {"raises": raises, "does nothing": lambda work: lambda: None, "is stale": is_stale}[wrong]
    with caplog.at_level(logging.WARNING), mock.patch.dict(BY_DEVICE, {"cpu": capture}):
        passes([(Weights(), batches(40)), (Weights(2.0), batches(40))])
    messages = [record.message for record in caplog.records]
    assert len(messages) == 1 and messages[0].startswith("a training step is not captured in a CUDA graph")
    assert messages[0].endswith(
        "operation not permitted when stream is capturing" if wrong == "raises" else "other bits"
    )


def test_what_cannot_be_captured_is_said_once(graph, caplog):
    passes([(Weights(), batches(30)), (Weights(2.0), batches(30))], "looks")
    assert graph.captures == 0
    (record,) = caplog.records
    assert record.message.endswith(": it looks at values, or is another one each time")


def test_a_step_that_reads_an_expanded_tensor_is_captured(graph):
    runs = []
    for value in (1.0, 2.0):
        weights = Weights()
        weights.read = torch.full((1,), value).expand(3)
        runs.append((weights, batches(5)))
    passes(runs)
    assert graph.captures == 1 and graph.launches == 10 - TRACED


def test_a_tensor_that_two_phases_of_a_step_have_is_captured_as_one(graph):
    """As the sum of their losses, which both add to."""
    plain, weights = Weights(), Weights()
    state = [weights.sums, weights.weight, weights.sums, weights.read]
    steps = replay.Steps(weights.step, "step", state, 3, ())
    for batch in batches(5):
        plain.step(batch)
        steps.take(batch)
    steps.end()
    assert graph.captures == 1 and graph.launches == 5 - TRACED
    assert torch.equal(weights.sums, plain.sums) and torch.equal(weights.weight, plain.weight)


def test_trainings_of_many_kinds_keep_their_captures(graph):
    """Such as two of an algorithm for each of five models."""
    for _ in range(3):
        for kind in range(10):
            weights = Weights()
            steps = replay.Steps(weights.step, kind, [weights.weight, weights.sums, weights.read], 2, ())
            for batch in batches(5):
                steps.take(batch)
            steps.end()
    assert graph.captures == 10


def test_buffers_have_the_layout_and_the_alignment_of_what_they_stand_for():
    storage = torch.arange(24.0)
    for view in (storage[3:9].view(2, 3).t(), storage[:0], storage):
        own = cuda_graphs._empty_like(view, int(view.storage_offset()))
        assert (own.shape, own.stride(), own.storage_offset()) == (view.shape, view.stride(), view.storage_offset())


@pytest.mark.parametrize("name", ["fedgmh-full", *(pytest.param(name, marks=pytest.mark.slow) for name in LOSSES)])
def test_an_algorithm_captured_gives_the_same_bits(name, graph, tmp_path):
    conformance.replayed_steps_are_the_steps(Runs(every_algorithm()[name], tmp_path))
    assert graph.launches


@pytest.mark.parametrize(
    ("case", "model", "executor"),
    [
        ("fedgmh-full", "mlp", "lanes"),
        pytest.param("fedproto", "cnn", "loop", marks=pytest.mark.slow),
        pytest.param("fedavg", "resnet18", "loop", marks=pytest.mark.slow),
    ],
)
def test_a_device_launches_captured_steps_without_waits_and_copies(case, model, executor):
    recorder, raw = Recorder(), stub_run.settings(every_algorithm()[case], model, executor, steps=20)
    with mock.patch.dict(BY_DEVICE, {"stub": recorder}):
        captured = stub_run.run(raw, True)
        with replay.without_replay():
            plain = stub_run.run(raw, True)
    for path, leaf in plain.values.items():
        torch.testing.assert_close(captured.values[path], leaf, rtol=0, atol=0)
    captured_counts, plain_counts = captured.counts["update"], plain.counts["update"]
    assert recorder.launches >= 20 - TRACED and recorder.captures >= 1
    assert (captured_counts.uploads, captured_counts.downloads) == (plain_counts.uploads, plain_counts.downloads)
    assert captured_counts.syncs == plain_counts.syncs + recorder.captures, "a capture is compared once"


FORMS = {  # of batches: those that are full, and the last one of a client
    "one client a round, E 2, lr_decay .99": ("mlp", "loop", {"epochs": 2, "batch_size": 10, "participation": 0.34}, 2),
    "lanes, whose last batch is padded": ("mlp", "lanes", {"epochs": 2, "batch_size": 10}, 1),
    "4 steps": ("mlp", "loop", {"steps": 4}, 1),
    "8 steps in lanes": ("mlp", "lanes", {"steps": 8}, 1),
    "adam": ("mlp", "loop", {"steps": 4, "optimizer": "adam"}, 1),
    "resnet18 in a loop": ("resnet18", "loop", {"steps": 4}, 1),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "resnet18" in name else []) for name in FORMS]
)
@pytest.mark.parametrize("case", ["fedavg", "fedgmh-full", "fedproto", "pfedpm-relation"])
def test_a_step_is_traced_twice_and_captured_once_in_a_run(case, name):
    """Whatever the learning rate of a round: from then on all steps of its form are launched by their capture."""
    model, executor, training, forms = FORMS[name]
    recorder, clear_traces = Recorder(), replay.clear_traces
    raw = stub_run.settings(every_algorithm()[case], model, executor)
    raw["training"] |= {"rounds": 2, "lr_decay": 0.99, "steps": None, **training}

    def begin():
        clear_traces()
        traced.reset_mock()
        steps.reset_mock()

    with (
        mock.patch.dict(BY_DEVICE, {"stub": recorder}),
        mock.patch.object(replay, "Recording", side_effect=replay.Recording) as traced,
        mock.patch.object(replay.Steps, "take", autospec=True, side_effect=replay.Steps.take) as steps,
        mock.patch.object(replay, "clear_traces", begin),
    ):
        stub_run.run(raw, True)
    assert (traced.call_count, recorder.captures) == (TRACED * forms, forms)
    assert recorder.launches == steps.call_count - traced.call_count


class Gpu:
    """A GPU whose memory for graphs is like PyTorch's: gone for good with the last graph that had it."""

    def __init__(self) -> None:
        self.uses: dict[int, int] = {}
        self.allocating: set[int] = set()  # pools; meanwhile nothing is given back that several streams used
        self.failed = False
        self.streams = self.captures = 0

    def stream(self) -> "Stream":
        self.streams += 1
        return Stream()

    def graph(self) -> "Graph":
        return Graph(self)


class Stream:
    def wait_stream(self, other: "Stream") -> None:
        assert isinstance(other, Stream)


class Graph:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._pool = gpu, -1

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        if self._gpu.uses.get(pool) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        assert capture_error_mode == "thread_local"
        self._gpu.uses[pool] = self._gpu.uses.get(pool, 0) + 1
        self._gpu.allocating.add(pool)
        self._pool = pool
        self._gpu.captures += 1

    def capture_end(self) -> None:
        """As in PyTorch, which looks first whether the capture has failed."""
        if self._gpu.failed:
            self._gpu.failed = False
            raise RuntimeError("operation failed due to a previous error during capture")
        self._gpu.allocating.remove(self._pool)

    def replay(self) -> None:
        pass

    def __del__(self) -> None:
        if self._pool >= 0:  # it was captured
            self._gpu.uses[self._pool] -= 1


@pytest.fixture
def gpu(monkeypatch):
    fake_gpu = Gpu()
    zeros = torch.zeros
    monkeypatch.setattr(torch.cuda, "CUDAGraph", fake_gpu.graph)
    monkeypatch.setattr(torch.cuda, "Stream", fake_gpu.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 7)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    end = lambda device, pool: fake_gpu.allocating.remove(pool)  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: zeros(*shape))
    cuda_graphs._graph_resources.cache_clear()
    yield fake_gpu
    cuda_graphs._graph_resources.cache_clear()


def test_a_step_can_be_captured_after_the_only_graph_has_gone(gpu):
    for _ in range(3):  # as with another learning rate in each round
        launch = cuda_graphs.cuda_graph(lambda: None)
        launch()
        del launch
        gc.collect()
    assert gpu.uses == {7: 1} and gpu.captures == 4, "that of the memory's keeper besides"


def test_graphs_are_captured_on_one_stream(gpu):
    kept = [cuda_graphs.cuda_graph(lambda: None) for _ in range(3)]
    assert gpu.streams == 1 and gpu.uses == {7: 1 + len(kept)}


@pytest.mark.parametrize("where", ["in the work", "at the end"])
def test_a_failed_capture_is_no_longer_allocated_for_and_its_reason_is_kept(where, gpu):
    """Else memory grows from then on: 40 uploads held 64 MiB before such a capture, and 2,496 MiB after it."""

    def work():
        gpu.failed = True
        if where == "in the work":
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted" if where == "in the work" else "previous error"):
        cuda_graphs.cuda_graph(work)
    assert gpu.allocating == set()
    cuda_graphs.cuda_graph(lambda: None)()
    assert gpu.allocating == set()
