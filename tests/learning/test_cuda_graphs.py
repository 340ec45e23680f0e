"""CUDA graphs, with stand-ins for PyTorch's: the memory that graphs share is kept from one to the next."""

import contextlib
import gc

import pytest
import torch

from pflmpi.learning import cuda_graphs


class Gpu:
    """A GPU whose memory for graphs is like PyTorch's: gone for good with the last graph that had it."""

    def __init__(self) -> None:
        self.uses: dict[int, int] = {}
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
        self._pool = pool
        self._gpu.captures += 1

    def capture_end(self) -> None:
        pass

    def replay(self) -> None:
        pass

    def __del__(self) -> None:
        if self._pool >= 0:  # it was captured
            self._gpu.uses[self._pool] -= 1


@pytest.fixture
def gpu(monkeypatch):
    found = Gpu()
    zeros = torch.zeros
    monkeypatch.setattr(torch.cuda, "CUDAGraph", found.graph)
    monkeypatch.setattr(torch.cuda, "Stream", found.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 7)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: zeros(*shape))
    cuda_graphs._shared.cache_clear()
    yield found
    cuda_graphs._shared.cache_clear()


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
