"""Sums and means in slices over the ranks have the bits of a plain sum in one place, whoever owns them."""

import itertools
import tracemalloc
from functools import partial

import numpy as np
import pytest
import torch

import quick_run
from every_algorithm import MESSAGE_KINDS, every_algorithm
from pflmpi import tree
from pflmpi.errors import RunError
from pflmpi.learning.task import HOST
from pflmpi.messages import device_sum, slices
from pflmpi.messages.declared import Declared
from pflmpi.messages.kinds import Mean, Rows, Sum, tensor
from pflmpi.messages.packing import to_numpy
from pflmpi.messages.traffic import wire_bytes
from pflmpi.messages.uplink import send_up, up_calls
from pflmpi.tree import Tree
from stub_device import DEVICE
from stub_threads import run_stub_ranks
from thread_transport import run_ranks

NEVER = 2**62
LIMITS = {"entries to rank 0": (NEVER, NEVER), "sums to rank 0": (0, NEVER), "slices": (0, 4)}  # that lead to each
NUM_TRAIN = np.array([3, 50, 7, 1, 900, 12, 33, 4, 60, 5, 5, 21])
LEAVES = {"a": (7,), "b": (3, 5), "c": (), "d": (0, 4), "e": (70001,), "f": (1, 1, 2)}
ASSIGNED = {  # clients of each rank, in groups
    1: [[[0, 3], [1, 2, 7]]],
    2: [[[0, 4]], [[1, 2]]],
    3: [[], [[5]], [[2, 9]]],
    5: [[[0]], [], [[1]], [[2], [3]], []],
    4: [[], [[1, 2], [0]], [], []],
}
MANY = {2: [[[0, 4], [5, 6, 7]], [[1]]], 3: [[[3]], [], [[0, 1, 2, 4, 5, 6, 7, 8]]]}


def likes(number):
    return {name: tensor(*shape, dtype=number) for name, shape in LEAVES.items()}


def declared():
    integers: Tree = {
        "n": tensor(5, dtype=torch.int32),
        "o": tensor(2, dtype=torch.int64),
        "p": tensor(37, dtype=torch.uint8),
    }
    up = {
        "mean": Mean({**likes(torch.float32), **integers}),
        "plain": Mean({"double": tensor(11, dtype=torch.float64)}, by="clients"),
        "sum": Sum({"float": tensor(9), "whole": tensor(4, dtype=torch.int64)}),
    }
    return Declared(up, {}, np.ones((len(NUM_TRAIN), 2), bool), NUM_TRAIN)


def message(kinds, client):
    random = np.random.default_rng(client)

    def values(leaf):
        if leaf.dtype == torch.int64:  # of which float64 does not hold all
            return torch.from_numpy(random.integers(-(2**58), 2**58, tuple(leaf.shape)))
        if not leaf.is_floating_point():
            return torch.from_numpy(random.integers(0, 20, tuple(leaf.shape))).to(leaf.dtype)
        scale = 10.0 ** random.integers(-30, 30)
        return torch.as_tensor(random.standard_normal(tuple(leaf.shape)) * scale).to(leaf.dtype)

    return {name: tree.map(values, kind.like) for name, kind in kinds.items()}


def ups(kinds, groups):
    return [
        (group, {name: tree.stack([message(kinds, client)[name] for client in group.tolist()]) for name in kinds})
        for group in groups
    ]


def slices_of(what, layout):
    return slices.cut_slices(what.entries, [[np.array(group) for group in groups] for groups in layout])


def plain_sum(kind, rows, clients):
    """What the fold is, written out: multiples of a power of two as integers, added, and divided.

    A mean of what is not floating is the first participant's.
    """
    if rows[0].dtype.kind != "f":
        return rows[0] if isinstance(kind, Mean) else np.sum(rows, 0, dtype=np.int64)
    samples = isinstance(kind, Mean) and kind.by == "samples"
    weights = NUM_TRAIN[clients].astype(np.float64) if samples else np.ones(len(clients))
    terms = [row.astype(np.float64) * weight for row, weight in zip(rows, weights, strict=True)]
    largest = max(np.abs(term).max(initial=0) for term in terms)
    shift = 62 - int(np.ceil(np.log2(max(len(clients), 2)))) - int(np.frexp(largest)[1])
    total = sum(np.rint(term * 2.0**shift).astype(np.int64) for term in terms)
    result: np.ndarray = total.astype(np.float64) * 2.0**-shift / (weights.sum() if isinstance(kind, Mean) else 1.0)
    return result.astype(rows[0].dtype)


def lead(monkeypatch, way):
    for name, value in zip(("_GATHERED", "_LEAST_SLICE"), LIMITS[way], strict=True):
        monkeypatch.setattr(slices, name, value)


def check(what, layout, run=run_ranks, there=lambda group, name: False, device=HOST):
    """`there`: which messages of which groups are on the device of the ranks."""
    kinds: dict[str, Sum] = {name: kind for name, kind in what.up.items() if isinstance(kind, Sum)}
    assigned = [[np.array(group) for group in groups] for groups in layout]

    def work(transport, *_):
        made = ups(kinds, assigned[transport.rank])
        sent = [
            (group, {name: tree.to(part, device) if there(group, name) else part for name, part in messages.items()})
            for group, messages in made
        ]
        aggregates = send_up(transport, what, sent, assigned, device)
        for (_, before), (_, after) in zip(made, sent, strict=True):
            for path, leaf in tree.leaves({**before}):
                assert torch.equal(tree.at({**after}, path).cpu(), leaf), "what a client keeps has changed"
        return aggregates, transport.take_moved()

    results = run(len(assigned), work)
    assert [aggregates is None for aggregates, _ in results] == [rank > 0 for rank in range(len(assigned))]
    aggregates = results[0][0]
    assert aggregates is not None and aggregates.keys() == kinds.keys()
    clients = np.sort(np.concatenate([group for groups in assigned for group in groups]))
    messages = [message(kinds, client) for client in clients.tolist()]
    for name, kind in kinds.items():
        for path, leaf in tree.leaves(aggregates[name]):
            rows = [to_numpy(tree.at(client_message[name], path)) for client_message in messages]
            right = np.stack(rows) if isinstance(kind, Rows) else plain_sum(kind, rows, clients)
            assert (leaf.dtype, tuple(leaf.shape)) == (tree.at(kind.like, path).dtype, right.shape), path
            assert leaf.numpy().tobytes() == right.tobytes(), path
    assert results[0][1] == wire_bytes(up_calls(what, assigned))[::-1]


@pytest.mark.parametrize("way", LIMITS)
@pytest.mark.parametrize("ranks", ASSIGNED)
def test_every_owner_makes_the_bits_of_a_plain_sum(way, ranks, monkeypatch):
    lead(monkeypatch, way)
    cut = slices_of(declared(), ASSIGNED[ranks])
    owners = np.flatnonzero(cut.widths).tolist()
    assert owners == [1] if ranks == 4 else owners == [0] if ranks == 1 or way != "slices" else len(owners) > 1
    check(declared(), ASSIGNED[ranks])


@pytest.mark.parametrize("way", LIMITS)
@pytest.mark.parametrize("ranks", MANY)
def test_likewise_with_many_participants_on_a_rank(way, ranks, monkeypatch):
    lead(monkeypatch, way)
    cut = slices_of(declared(), MANY[ranks])
    assert cut.sums.any() == (way != "entries to rank 0") and not cut.sums.all()  # some send entries, some sums
    check(declared(), MANY[ranks])


@pytest.mark.parametrize(
    ("direct", "some"), [(True, True), (False, False)], ids=["from GPU to GPU, some there", "through hosts, all there"]
)
@pytest.mark.parametrize("way", LIMITS)
@pytest.mark.parametrize("layout", [*ASSIGNED.values(), *MANY.values()], ids=str)
def test_what_is_on_a_gpu_is_summed_there_with_the_same_bits(way, layout, some, direct, monkeypatch):
    lead(monkeypatch, way)
    monkeypatch.setattr(device_sum, "_ENTRIES", 50_000)  # so that a leaf has several blocks
    members = range(len(layout)) if direct else ()
    run = partial(run_stub_ranks, members=members)
    check(declared(), layout, run, lambda group, _: not some or len(group) == 1, DEVICE)


def test_of_the_models_of_one_process_their_mean_alone_crosses_to_the_host():
    """In the type of the model: it was their sum, in int64."""
    size, clients = 10**5, np.arange(5)
    what = Declared({"model": Mean({"x": tensor(size)})}, {}, np.ones((12, 2), bool), NUM_TRAIN)

    def work(transport, stub):
        sent = [(group, tree.to(message, DEVICE)) for group, message in ups(what.up, [clients[:3], clients[3:]])]
        stub.bytes_moved = 0
        send_up(transport, what, sent, [[clients[:3], clients[3:]]], DEVICE)
        return stub.bytes_moved

    assert run_stub_ranks(1, work, ()) == [pytest.approx(4 * size, abs=1000)]


@pytest.mark.parametrize("server_has_a_gpu", [True, False])
def test_models_cross_to_the_host_for_the_servers_state_alone(server_has_a_gpu):
    """The classic layout: 8 ranks, a client each, here with a model of 4 MB, of which 11 crossed for each rank."""
    count, size = 8 + (not server_has_a_gpu), 10**6
    what = Declared({"model": Mean({"a": tensor(size - 7), "b": tensor(7)})}, {}, np.ones((12, 2), bool), NUM_TRAIN)
    assigned = [[np.array([rank])] for rank in range(8)]
    assigned = assigned if server_has_a_gpu else [[], *assigned]

    def work(transport, stub):
        groups = assigned[transport.rank]
        on_host = not server_has_a_gpu and transport.rank == 0
        sent = ups(what.up, groups) if on_host else [(g, tree.to(m, DEVICE)) for g, m in ups(what.up, groups)]
        stub.bytes_moved = 0
        send_up(transport, what, sent, assigned, HOST if on_host else DEVICE)
        return stub.bytes_moved

    moved = run_stub_ranks(count, work, range(count) if server_has_a_gpu else range(1, count))
    slice_bytes, few = 4 * size / count, 1000
    if server_has_a_gpu:
        assert moved[0] == pytest.approx(slice_bytes, abs=few), "the transport brings the slices of others to its host"
        assert max(moved[1:]) < few
    else:
        assert moved[1:] == pytest.approx([2 * slice_bytes] * 8, abs=few), "to rank 0, and the result of its own slice"


@pytest.mark.parametrize("way", LIMITS)
def test_what_is_gathered_goes_beside_what_is_folded(way, monkeypatch):
    lead(monkeypatch, way)
    what = declared()
    rows = {"each": Rows({"x": tensor(3), "y": tensor(2, dtype=torch.int32)}), "zero": Rows({"x": tensor()})}
    what = Declared({**what.up, **rows}, {}, what.holds, what.num_train)
    check(what, ASSIGNED[3])
    check(what, ASSIGNED[3], partial(run_stub_ranks, members=range(3)), lambda _, name: name not in rows, DEVICE)


def test_gathered_models_of_rank_0_are_not_packed():
    size, clients = 2**18, np.arange(8)
    what = Declared({"model": Rows({"x": tensor(size)})}, {}, np.ones((12, 2), bool), NUM_TRAIN)
    models = torch.rand(len(clients), size)
    tracemalloc.start()
    (aggregates,) = run_ranks(1, lambda rank: send_up(rank, what, [(clients, {"model": {"x": models}})], [[clients]]))
    most = tracemalloc.get_traced_memory()[1]  # NumPy's, so without the tensors that come out
    tracemalloc.stop()
    assert aggregates is not None and torch.equal(tree.at(aggregates["model"], "x"), models)
    assert most < 0.5 * models.nbytes


@pytest.mark.parametrize("way", LIMITS)
def test_messages_without_entries(way, monkeypatch):
    lead(monkeypatch, way)
    empty: Tree = {"x": tensor(0), "y": tensor(3, 0)}
    check(Declared({"mean": Mean(empty)}, {}, np.ones((12, 2), bool), NUM_TRAIN), ASSIGNED[2])


@pytest.mark.parametrize("way", LIMITS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_sum_that_may_leave_int64_ends_the_run(ranks, way, monkeypatch):
    lead(monkeypatch, way)
    what = Declared({"sum": Sum({"x": tensor(70_000, dtype=torch.int64)})}, {}, np.ones((12, 2), bool), NUM_TRAIN)
    assigned = [[np.arange(rank, 6, ranks)] for rank in range(ranks)]

    def work(transport, value):
        (clients,) = assigned[transport.rank]
        return send_up(
            transport, what, [(clients, {"sum": {"x": torch.full((len(clients), 70_000), value)}})], assigned
        )

    aggregates = run_ranks(ranks, partial(work, value=-(2**59)))[0]
    assert aggregates is not None and set(tree.leaf(tree.part(aggregates, "sum"), "x").tolist()) == {-6 * 2**59}
    with pytest.raises(
        RunError, match="the sum of sum/x over 6 participants may leave int64: the largest magnitude is 2305"
    ):
        run_ranks(ranks, partial(work, value=2**61))


def test_very_small_doubles_are_summed():
    """2.0**shift would not be a number."""
    what = Declared({"sum": Sum({"x": tensor(2, dtype=torch.float64)})}, {}, np.ones((12, 2), bool), NUM_TRAIN)
    tiny = torch.tensor([[2.0**-1000, 0.0], [2.0**-960, -(2.0**-950)]], dtype=torch.float64)

    def work(transport):
        return send_up(transport, what, [(np.array([0, 1]), {"sum": {"x": tiny}})], [[np.array([0, 1])]])

    (aggregates,) = run_ranks(1, work)
    assert tree.leaf(tree.part(aggregates, "sum"), "x").tolist() == [2.0**-960, -(2.0**-950)]


RESNET = 11_181_642  # entries
MODEL = 4 * RESNET


def cut(layout, entries=RESNET):
    """The slices where each rank has so many participants."""
    ends = np.cumsum(layout)
    assigned = [[np.arange(end - count, end)] if count else [] for count, end in zip(layout, ends, strict=True)]
    like: Tree = {"a": tensor(entries // 3), "b": tensor(entries - entries // 3)}
    return slices.cut_slices(slices.Entries.of({"model": Mean(like)}), assigned)


def sent(cuts):
    """Bytes that each rank sends to others, as a share of the model."""
    result: np.ndarray = (cuts.traffic.sent + cuts.finished) / (4 * cuts.entries.count)
    return result


@pytest.mark.parametrize(
    ("layout", "most"),
    [
        ([2, 2], 1.5),
        ([1, 1], 1.0),
        ([1, 1, 1, 1], 1.0),
        ([0, 1, 1, 1, 1], 1.0),
        ([50, 50], 1.5),
        ([1] * 100, 1.0),
        ([1, 0, 0, 0], 0.0),  # one rank has all
        ([0, 0, 7, 0], 1.0),
    ],
)
def test_a_rank_sends_at_most_one_and_a_half_models(layout, most):
    assert sent(cut(layout)).max() == pytest.approx(most, abs=1e-3)


LAYOUTS = [
    *itertools.chain(*(itertools.product((0, 1, 2, 3, 50), repeat=ranks) for ranks in (2, 3, 4))),
    (2,) * 20,
    (50,) * 8,
    (1,) * 99 + (2,),
    (0,) * 50 + (3, 0, 3) + (0,) * 50,
]


def test_bytes_up_of_every_rank_in_every_layout():
    """One model with one participant; two less a slice with several; a rank without has only its slice to send."""
    for layout in filter(any, LAYOUTS):
        cuts, senders = cut(list(layout)), np.count_nonzero(layout)
        most = np.array([min(1.0 / senders, 0.5), 1.0, 2 - 1 / senders])[np.minimum(layout, 2)]
        assert (sent(cuts) <= most + 1e-3).all(), layout
        if senders <= 2:
            assert sent(cuts).max() <= 1.501, layout
        assert (cuts.traffic.received <= 2.001 * MODEL).all(), layout  # nor is any rank sent more than two models


def test_slices_are_equal_and_not_too_small():
    assert np.ptp(cut([1] * 7).slice_bytes) <= 4
    owners = cut([1] * 1000, 200_000).slice_bytes
    assert owners[0] >= slices._LEAST_SLICE
    assert owners.sum() == 800_000 and np.count_nonzero(owners) == 12


def test_small_messages_make_one_exchange_and_large_ones_at_most_three_and_a_broadcast():
    def moving(cuts):
        return [call.moved > 0 for call in cuts.calls]

    assert moving(cut([5, 5], 500)) == [True, False]
    assert moving(cut([5000, 5000], 500)) == [True, True, True, False]  # magnitudes to rank 0 and back, and sums
    assert moving(cut([9, 0, 0], 500)) == [False, False]


@pytest.mark.parametrize("name", MESSAGE_KINDS)
@pytest.mark.parametrize("way", ["sums to rank 0", "slices"])
def test_a_run_in_slices_has_the_bits_of_one_rank(way, name, tmp_path, monkeypatch):
    raw = quick_run.settings(every_algorithm()[name])
    expected = quick_run.run(raw, tmp_path / "one", 1)
    lead(monkeypatch, way)
    assert quick_run.run(raw, tmp_path / "three", 3) == expected
