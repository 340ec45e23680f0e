"""Messages: their size, and the sum whose bits do not depend on the order of the terms."""

import tracemalloc
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import quick_run
from pflmpi import tree
from pflmpi.algorithms.base import Algorithm, Round
from pflmpi.algorithms.distances import cosines, inner_products, weighted_sums
from pflmpi.errors import ConfigError
from pflmpi.learning.client import ClientData
from pflmpi.learning.personal import Personal, Received
from pflmpi.learning.task import Task
from pflmpi.messages.exact import OnHost, common_shift, largest_magnitudes
from pflmpi.messages.kinds import (
    ClassMeans,
    Downlink,
    Mean,
    Messages,
    Own,
    OwnClasses,
    Rows,
    Shared,
    Sum,
    Uplink,
    tensor,
)
from pflmpi.messages.packing import ALIGNED, pack, unpack
from pflmpi.store import partition_file, run_folder
from pflmpi.tree import Tree, leaf


def to_fixed(values, shift):
    fixed = np.zeros(len(values), np.int64)
    OnHost().add(fixed, [(values[np.newaxis], np.ones(1))], shift)
    return fixed


def from_fixed(fixed, shift):
    values = np.empty(len(fixed))
    OnHost().finish([], [fixed], shift, 1.0, torch.float64, values)
    return values


def fixed_sum(terms):
    shift = int(common_shift(np.array([np.abs(terms).max()]), len(terms))[0])
    return float(from_fixed(to_fixed(terms, shift).sum(keepdims=True), shift)[0])


def test_a_mean_with_unknown_weights_is_refused():
    with pytest.raises(ConfigError, match="Mean has by = 'client'; allowed: samples, clients"):
        Mean({"w": tensor(2)}, by="client")


def test_sizes_are_the_papers():
    assert ClassMeans(512, counts=False).client_bytes(100) == 100 * (4 * 512 + 4)
    assert round(ClassMeans(512, counts=False).client_bytes(100) / 1024, 2) == 200.39
    assert ClassMeans(50).client_bytes(4) == 4 * (4 * 50 + 4 + 4)
    head = {"weight": tensor(10, 512), "bias": tensor(10)}
    assert OwnClasses(head).client_bytes(100) == 4 * 100 * 5130
    assert Shared(head).client_bytes(3) == Own(head).client_bytes(7) == 4 * 5130
    assert Mean(head).client_bytes(1) == Rows(head).client_bytes(9) == 4 * 5130


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False), min_size=1, max_size=40),
    st.randoms(use_true_random=False),
)
@settings(max_examples=200, deadline=None)
def test_the_sum_has_the_same_bits_in_every_order_and_grouping(values, random):
    terms = np.array(values, np.float64)
    shift = int(common_shift(np.array([np.abs(terms).max()]), len(terms))[0])
    fixed = to_fixed(terms, shift)
    cut = random.randint(0, len(terms))
    order = list(range(len(terms)))
    random.shuffle(order)
    assert fixed[order][:cut].sum() + fixed[order][cut:].sum() == fixed.sum()


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=100))
@settings(max_examples=200, deadline=None)
def test_the_sum_is_right_to_the_last_float32_bit(values):
    exact = sum((Fraction(value) for value in values), Fraction(0))
    scale = max(abs(Fraction(value)) for value in values)
    # Every term is rounded to 2**-54 of the largest at the worst: 62 bits less the bits that 100 terms need.
    assert abs(Fraction(fixed_sum(np.array(values, np.float64))) - exact) <= scale * len(values) / 2**53


def test_the_sum_of_equal_largest_values_does_not_overflow():
    for terms in (1, 2, 3, 64, 1000):
        values = np.full(terms, np.nextafter(2.0**40, 0))
        assert fixed_sum(values) == pytest.approx(terms * 2.0**40, rel=1e-15)
        assert fixed_sum(-values) == pytest.approx(-terms * 2.0**40, rel=1e-15)


def test_zeros_stay_zero():
    assert fixed_sum(np.zeros(5)) == 0


def test_a_large_message_is_added_in_blocks_that_need_little_memory():
    values = np.random.default_rng(0).normal(0, 0.1, 2**20 + 3).astype(np.float32)
    total = np.arange(len(values))  # of which nothing is left
    expected = np.rint(values.astype(np.float64) * 3.0 * 2.0**50).astype(np.int64)
    tracemalloc.start()
    OnHost().add(total, [(values[np.newaxis], np.array([3.0]))], 50)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.array_equal(total, expected)
    assert peak < 2**21, "of 4 MiB of values"


def test_the_largest_magnitude_of_each_row_tells_what_is_not_finite():
    leaf = np.array([[1.0, -3.0], [2.0, 0.5], [float("nan"), 9.0], [-float("inf"), 0.0]], np.float32)
    assert largest_magnitudes(leaf)[:2].tolist() == [3.0, 2.0]
    assert np.isfinite(largest_magnitudes(leaf)).tolist() == [True, True, False, False]
    assert largest_magnitudes(np.array([[0.5], [-2.0]])).tolist() == [0.5, 2.0]
    assert largest_magnitudes(np.empty((2, 0))).tolist() == [0.0, 0.0]
    assert largest_magnitudes(np.array([[-(2**31)], [7]], np.int32)).tolist() == [2.0**31, 7.0]


def test_unpacked_leaves_share_the_memory_of_the_message_but_where_it_is_not_aligned():
    value: tree.Tree = {"a": torch.rand(8), "b": torch.rand(3), "c": torch.rand(5), "d": torch.rand(2, 3)}
    buffer = pack(value)
    leaves = dict(tree.leaves(unpack(buffer, tree.like(value))))
    assert all(torch.equal(leaf, tree.leaf(value, path)) for path, leaf in leaves.items())
    assert all(leaf.data_ptr() % ALIGNED == 0 for leaf in leaves.values())
    shared = [path for path, leaf in leaves.items() if np.shares_memory(leaf.numpy(), buffer)]
    assert shared == ["a", "b", "d"]


@dataclass(frozen=True, kw_only=True)
class Counts(Algorithm):
    """Nobody trains; the server hears how many samples there are, in four ways."""

    summary: ClassVar[str] = "counts"
    paper: ClassVar[str] = "-"
    predicts_with: ClassVar[tuple[str, ...]] = ("model",)

    def uplink(self, task: Task) -> Mapping[str, Uplink]:
        like: Tree = {"number": tensor()}
        return {"sum": Sum(like), "mean": Mean(like), "plain": Mean(like, by="clients"), "each": Rows(like)}

    def downlink(self, task: Task) -> Mapping[str, Downlink]:
        return {"model": Shared(task.like()), "own": Own({"number": tensor()}), "all": Shared({"number": tensor()})}

    def init_server(self, task: Task) -> Tree:
        return {name: torch.zeros(()) for name in ("sum", "mean", "plain", "largest")}

    def init_client(self, task: Task) -> Tree:
        return {"heard": torch.zeros(())}

    def publish(self, task: Task, server: Tree, receivers: np.ndarray) -> Messages:
        own: Tree = {"number": torch.from_numpy(receivers).float()}
        return {"model": task.init(), "own": own, "all": {"number": leaf(server, "sum")}}

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        heard = leaf(down["own"], "number") + leaf(down["all"], "number")
        return {"heard": heard}, {name: {"number": data.num_samples} for name in self.uplink(task)}

    def server_update(self, task: Task, server: Tree, up: Messages, round: Round) -> Tree:
        numbers = {name: leaf(up[name], "number") for name in up}
        return {**{name: numbers[name] for name in ("sum", "mean", "plain")}, "largest": numbers["each"].max()}

    def personal(self, task: Task) -> Personal:
        return Received("model")


@pytest.mark.parametrize("executor", ["loop", "lanes"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_single_numbers_travel_in_every_kind_of_tree(executor, ranks, tmp_path):
    raw = quick_run.settings(algorithm={"name": f"{__file__}:Counts"}, runtime={"executor": executor})
    quick_run.run(raw, tmp_path / "run", ranks)
    chosen = run_folder.read_metrics(tmp_path / "run", 3)["participants"]
    samples = partition_file.read(tmp_path / "run").train.sum(1)[chosen].astype(np.float64)
    server = run_folder.read_server(tmp_path / "run", 3)
    expected = {
        "sum": samples.sum(),
        "mean": (samples**2).sum() / samples.sum(),
        "plain": samples.mean(),
        "largest": samples.max(),
    }
    assert {name: float(value) for name, value in server.items()} == pytest.approx(expected, rel=1e-7)


def test_models_with_single_numbers_are_compared_and_mixed():
    models: Tree = {"weight": torch.tensor([[3.0, 0.0], [0.0, 3.0]]), "number": torch.tensor([4.0, 4.0])}
    assert cosines(tree.map(inner_products, models)).tolist() == [[1.0, 0.64], [0.64, 1.0]]
    half = torch.full((2, 2), 0.5, dtype=torch.float64)
    assert weighted_sums(half, leaf(models, "number")).tolist() == [4.0, 4.0]
