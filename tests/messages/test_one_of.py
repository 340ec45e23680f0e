"""A message that is one of a few: clients get the one chosen for them, and all travel where that is less for rank 0."""

import itertools

import numpy as np
import pytest
import torch

from pflmpi.errors import RunError
from pflmpi.forecast.bytes import wire_bytes
from pflmpi.learning.task import HOST
from pflmpi.messages.declared import Declared
from pflmpi.messages.downlink import Reply, down_calls, send_down
from pflmpi.messages.groups import ClientGroup, clients_of
from pflmpi.messages.kinds import Messages, OneOf, Shared, tensor
from pflmpi.transports.base import Transport
from pflmpi.transports.inprocess import InProcessTransport
from pflmpi.tree import leaf
from thread_transport import run_ranks

CHOICES = torch.arange(6.0).reshape(3, 2)
SIZE = 8  # bytes of one
CHOSEN = [2, 0, 1, 1, 2, 0, 0, 2, 1, 1]


def declared(clients: int) -> Declared:
    down: dict[str, Shared] = {"centre": OneOf({"w": tensor(2)}, 3), "all": Shared({"a": tensor()})}
    return Declared({}, down, np.zeros((clients, 1), bool), np.zeros(clients, np.int64))


def published(receivers: int) -> Messages:
    chosen = torch.tensor((CHOSEN * receivers)[:receivers])
    return {"centre": {"choices": {"w": CHOICES}, "chosen": chosen}, "all": {"a": torch.tensor(7.0)}}


def assigned(*sizes: int) -> list[list[ClientGroup]]:
    """The clients of each rank: so many, in groups of two; rank 0 has those of the highest ids."""
    bounds = np.cumsum([0, *sizes[::-1]])
    ranks = [np.arange(start, stop) for start, stop in itertools.pairwise(bounds)][::-1]
    return [[clients[at : at + 2] for at in range(0, len(clients), 2)] for clients in ranks]


@pytest.mark.parametrize(
    "sizes", [(10,), (0, 2), (0, 3), (5, 2), (0, 5, 5), (1, 2, 0), (1, 9, 0), (0, 0, 1), (4, 5, 5, 5), (1,) * 16]
)
def test_every_client_gets_the_one_that_was_chosen(sizes: tuple[int, ...]) -> None:
    groups, count = assigned(*sizes), sum(sizes)

    def work(transport: Transport) -> tuple[Reply, tuple[int, int]]:
        down = published(count) if transport.rank == 0 else None
        return send_down(transport, declared(count), down, groups), transport.counter.take("data")

    results = run_ranks(len(groups), work)
    for (reply, _), mine in zip(results, groups, strict=True):
        for clients in (*mine, clients_of(mine)):
            down = reply.on(HOST).for_clients(clients)
            assert leaf(down["all"], "a").tolist() == [7] * len(clients)
            chosen = [CHOICES[CHOSEN[client % len(CHOSEN)]].tolist() for client in clients.tolist()]
            assert leaf(down["centre"], "w").tolist() == chosen
    assert results[0][1] == wire_bytes(down_calls(declared(count), groups), "mpi")[::-1]


@pytest.mark.parametrize(
    ("sizes", "all_travel"),
    [
        ([1] * 13, False),  # 12 others need one each, of 3 trees that go down 4 levels
        ([1] * 16, True),
        ([1] * 1000, True),
        ([0, 2], False),
        ([0, 100], False),  # rank 0 alone sends, to one rank
        ([100, 2], False),  # what rank 0 has itself does not travel
        ([25] * 3, False),
        ([25] * 4, True),
    ],
)
def test_all_travel_where_that_is_less_for_rank_0(sizes: list[int], all_travel: bool) -> None:
    _, call = down_calls(declared(sum(sizes)), assigned(*sizes))
    assert call.operation == ("broadcast" if all_travel else "scatter")
    if all_travel:
        assert set(call.sizes) == {3 * SIZE + 8 * sum(sizes)}
    else:
        assert list(call.sizes) == [SIZE * min(size, 3) + 8 * size for size in sizes]


def test_what_papers_count_is_one() -> None:
    assert declared(4).down_bytes(np.arange(4)).tolist() == [SIZE + 4] * 4


@pytest.mark.parametrize("wrong", [{"choices": {"w": CHOICES[:2]}}, {"chosen": torch.tensor([0, 1])}])
def test_others_than_declared_are_refused(wrong: Messages) -> None:
    down = published(4)
    declared(4).check_down(down, 4)
    with pytest.raises(RunError, match=r"the algorithm's downlink is not what it declares.*centre/"):
        declared(4).check_down({**down, "centre": {**down["centre"], **wrong}}, 4)


@pytest.mark.parametrize("wrong", [-1, 3])
def test_a_choice_that_is_not_there_is_refused(wrong: int) -> None:
    down = published(4)
    down["centre"]["chosen"] = torch.tensor([0, 1, wrong, 2])
    with pytest.raises(RunError, match=rf"the algorithm chose {wrong} of its message 'centre'; allowed are 0 to 2"):
        send_down(InProcessTransport(), declared(4), down, assigned(4))
