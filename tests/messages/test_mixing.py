"""Models that are compared and mixed by the owners of their leaves have the bits of one place with whole models."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from pflmpi import tree
from pflmpi.errors import RunError
from pflmpi.forecast.bytes import wire_bytes
from pflmpi.learning.task import Task
from pflmpi.learning.training import TrainingConfig
from pflmpi.messages import leaf_owners, mixing
from pflmpi.messages.declared import Declared
from pflmpi.messages.groups import ClientGroup
from pflmpi.messages.kinds import Centres, Compared, Messages, Mixed, tensor
from pflmpi.messages.leaf_owners import LeafOwners
from pflmpi.messages.linear_algebra import inner_products, weighted_sums
from pflmpi.models import MODELS
from pflmpi.transports.base import Transport
from pflmpi.tree import Tree
from thread_transport import run_ranks

N, K = 12, 2
LIKE: Tree = {
    "a": tensor(7),
    "b": {"c": tensor(3, 5), "d": tensor()},
    "e": tensor(30001),
    "f": tensor(2, dtype=torch.float64),
}
LAYOUTS = {  # clients of each rank, in groups
    "one rank": [[[0, 3], [1, 2, 7]]],
    "two": [[[0, 4]], [[1, 2]]],
    "a server alone": [[], [[5]], [[2, 9]]],
    "more ranks than participants": [[[0]], [], [[1]], [[3], [2]], []],
    "all on another": [[], [[1, 2], [0]], [], []],
    "one participant": [[], [[4]]],
}


def declared(like: Tree = LIKE) -> Declared:
    up, down = {"m": Compared(like), "n": Compared({"x": tensor(9)}, True)}, {"u": Mixed(like, "m")}
    return Declared(dict(up), dict(down), np.zeros((N, 1), bool), np.zeros(N, np.int64))


def with_centres() -> Declared:
    """As `declared`, with `K` trees of the server beside those of "m"."""
    plain = declared()
    return replace(plain, up={**plain.up, "k": Centres(LIKE, of="m", count=K)})


def message(clients: Sequence[int]) -> Messages:
    def values(leaf: torch.Tensor) -> torch.Tensor:
        rows = [np.random.default_rng(client).normal(size=tuple(leaf.shape)) for client in clients]
        return torch.from_numpy(np.stack(rows)).to(leaf.dtype)

    return {name: tree.map(values, kind.like) for name, kind in declared().compared.items()}


def weights(participants: int, centres: int = 0) -> Messages:
    generator = torch.Generator().manual_seed(participants)
    columns = participants + centres

    def random(rows: int) -> tree.Tree:
        return tree.map(lambda _: torch.rand(rows, columns, generator=generator, dtype=torch.float64), LIKE)

    return {"u": random(participants), **({"k": random(centres)} if centres else {})}


@pytest.mark.parametrize("centres", [0, K])  # of the server, compared and summed as if more participants had sent them
@pytest.mark.parametrize("least", [1, leaf_owners._LEAST])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_answers_and_sums_have_the_bits_of_whole_models(
    layout: str, least: int, centres: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaf_owners, "_LEAST", least)
    torch.set_num_threads(1)
    assigned: list[list[ClientGroup]] = [[np.array(group) for group in groups] for groups in LAYOUTS[layout]]
    owners = LeafOwners.of(with_centres() if centres else declared(), assigned)
    everyone, own = owners.participants.tolist(), range(100, 100 + centres)
    server: Tree = {"k": message(own)["m"], "other": torch.zeros(1)} if centres else {}
    given = weights(len(everyone), centres)
    mixing.check_weights(owners, given)

    def work(transport: Transport) -> tuple[Messages, Messages, Messages, tuple[int, int]]:
        first, ups = transport.rank == 0, [(group, message(group.tolist())) for group in assigned[transport.rank]]
        received, products = mixing.compare(transport, owners, ups, server if first else {})
        sums = mixing.sum_centres(transport, owners, received, given if first else {}) if centres else {}
        assert bool(sums) == (first and bool(centres))
        answers = mixing.mix(transport, owners, received, given if first else {})
        return products, sums, answers, transport.counter.take("data")

    results, rows = run_ranks(len(assigned), work), message([*everyone, *own])
    rows["n"] = message(everyone)["n"]
    for name, kind in declared().compared.items():
        for path, leaf in tree.leaves(rows[name]):
            flat = tree.flat_rows(leaf).double()
            flat = flat - flat[:1] if kind.from_first else flat
            assert torch.equal(tree.at(results[0][0][name], path), flat @ flat.mT), path
    for path, leaf in tree.leaves(rows["m"]):
        flat = tree.flat_rows(leaf).double()
        mixed = (tree.at(given["u"], path) @ flat).to(leaf.dtype)
        for (_, _, answers, _), groups in zip(results, assigned, strict=True):
            mine = np.sort(np.concatenate([np.empty(0, np.int64), *groups])).tolist()
            if not mine:
                assert answers == {}
                continue
            found = tree.at(answers["u"], path)
            right = mixed[[everyone.index(client) for client in mine]]
            assert found.dtype == leaf.dtype and torch.equal(tree.flat_rows(found), right), path
        if centres:
            found, right = tree.at(results[0][1]["k"], path), (tree.at(given["k"], path) @ flat).to(leaf.dtype)
            assert found.dtype == leaf.dtype and torch.equal(tree.flat_rows(found), right), path
    assert results[0][3] == wire_bytes([*owners.up_calls, *owners.down_calls], "mpi")[::-1]
    assert sum(map(bool, owners.owned)) == (min(len(assigned), 6) if least == 1 else 1)


@pytest.mark.parametrize("wrong", [{"u": LIKE}, {"k": LIKE}, {"u": LIKE, "k": LIKE}])
def test_other_weights_than_declared_are_refused(wrong: Messages) -> None:
    owners = LeafOwners.of(with_centres(), [[np.array([0, 1, 4])]])
    with pytest.raises(RunError, match=r"`mixing_weights` is not what it declares.*u/a.*return float64"):
        mixing.check_weights(owners, {**weights(3), **wrong})


@pytest.mark.parametrize("server_trains", [True, False])
def test_no_rank_gets_all_leaves_of_all_participants(server_trains: bool) -> None:
    """ResNet-18, 20 participants on as many ranks: the largest leaf is a fifth, and the server has the least."""
    bound = MODELS["resnet18"]().bind((3, 32, 32), 10)
    like = Task(bound, TrainingConfig(), 20, 0, (0.5,), (0.5,)).like("body", "head")
    what = Declared({"m": Compared(like)}, {"u": Mixed(like, "m")}, np.zeros((20, 1), bool), np.zeros(20, np.int64))
    clients = [[np.array([client])] for client in range(20)]
    owners = LeafOwners.of(what, clients if server_trains else [[], *clients])
    held = np.array([owners.bytes[leaves].sum() for leaves in owners.owned])
    assert held.sum() == owners.bytes.sum() and held.max() == owners.bytes.max() < 0.22 * held.sum()
    assert held[0] == held.min()
    for rank, size in enumerate(20 * held):
        received, sent = owners.rows.received_by(rank), owners.answers.sent_by(rank)
        assert sum(received.values()) == size and sent == received


def test_small_models_are_compared_and_mixed_in_one_place() -> None:
    assigned: list[list[ClientGroup]] = [[], [np.array([0, 1])], [np.array([2])]]
    owners = LeafOwners.of(declared({"a": tensor(100)}), assigned)
    assert [len(leaves) for leaves in owners.owned] == [2, 0, 0]
    assert [call.operation for call in (*owners.up_calls, *owners.down_calls)] == ["all-to-all", "all-to-all"]


def test_an_owner_needs_its_rows_their_answers_and_the_largest_leaf_of_both_in_float64() -> None:
    owners = LeafOwners.of(declared({"a": tensor(100), "b": tensor(10)}), [[np.array([0, 1])], [np.array([5])]])
    rows, answers, largest = 4 * (100 + 10 + 9), 4 * (100 + 10), 8 * 100  # "n", of 9, is compared alone
    assert [owners.memory(rank) for rank in (0, 1)] == [3 * (rows + answers + 2 * largest), 0]


def test_an_owner_needs_the_servers_rows_and_their_sums_too() -> None:
    up = {"m": Compared({"a": tensor(100), "b": tensor(10)}), "k": Centres({"a": tensor(100), "b": tensor(10)}, "m", K)}
    what = Declared(dict(up), {}, np.zeros((N, 1), bool), np.zeros(N, np.int64))
    owners = LeafOwners.of(what, [[np.array([0, 1])], [np.array([5])]])
    assert owners.memory(0) == (3 + K + K) * 4 * (100 + 10) + (3 + K) * 2 * 8 * 100


def test_what_is_not_finite_stays_so() -> None:
    rows = torch.tensor([[1.0, torch.nan], [2.0, 3.0]])
    assert inner_products(rows, from_first=False)[0].isnan().all()
    assert weighted_sums(torch.eye(2, dtype=torch.float64), rows)[:, 1].isnan().all()
