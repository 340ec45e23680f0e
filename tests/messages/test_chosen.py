"""What clients offer reaches those for whom it is chosen, from where it lives, once on each rank."""

from typing import Any

import numpy as np
import pytest
import torch

from pflmpi import tree
from pflmpi.errors import RunError
from pflmpi.forecast.bytes import wire_bytes
from pflmpi.messages.chosen import Offers, chosen_calls
from pflmpi.messages.declared import Declared
from pflmpi.messages.downlink import send_down
from pflmpi.messages.kinds import NOBODY, Chosen, Messages, Offered, tensor, with_rows
from pflmpi.transports.base import Transport
from pflmpi.transports.inprocess import InProcessTransport
from pflmpi.tree import Tree
from thread_transport import run_ranks

N, M = 6, 3
OFFER: Tree = {"a": tensor(7), "b": {"c": tensor(3, 5), "d": tensor(dtype=torch.int32)}}
SIZE = 4 * (7 + 15 + 1)
KIND = Chosen({"clients": tensor(M, dtype=torch.int64), "m": with_rows(OFFER, M)}, of="m")
NOT_KNOWN = np.zeros((N, 1), bool), np.zeros(N, np.int64)
WHAT = Declared({"m": Offered(OFFER)}, {"u": KIND}, *NOT_KNOWN)
CHOICES = {  # of each receiver
    "some": {0: [1, 5, NOBODY], 1: [0, 5, 2], 3: [NOBODY, NOBODY, NOBODY], 4: [5, 1, 0]},
    "the same for all": {0: [3, 2, 5], 1: [3, 2, 5], 4: [3, 2, 5]},
    "nobody": {2: [NOBODY] * M, 4: [NOBODY] * M},
}
HOMES = {  # ranks, and the home of each client
    "one rank": (1, [0, 0, 0, 0, 0, 0]),
    "two": (2, [0, 1, 0, 1, 0, 1]),
    "a server alone": (3, [1, 2, 1, 2, 2, 1]),
    "one client each": (7, [1, 2, 3, 4, 5, 6]),
    "ranks without clients": (5, [4, 4, 1, 4, 1, 1]),
}


def offer_of(client: int) -> Tree:
    return {"a": torch.arange(7.0) + client, "b": {"c": torch.full((3, 5), 0.1 * client), "d": torch.tensor(client)}}


def rows_of(clients: list[int]) -> Tree:
    nobody = tree.map(lambda leaf: torch.zeros(leaf.shape, dtype=leaf.dtype), OFFER)
    rows = tree.stack([nobody if client == NOBODY else offer_of(client) for client in clients])
    return tree.map(lambda leaf, like: leaf.to(like.dtype), rows, OFFER)


def deliver(choice: dict[int, list[int]], homes: str) -> list[Any]:
    """Of each rank: messages by receiver, ids that it was asked for, bytes that travelled down."""
    ranks, home = HOMES[homes]
    receivers = np.array(sorted(choice))
    assigned = [[np.array(one)] if one else [] for one in here(receivers, home, ranks)]

    def work(transport: Transport) -> Any:
        asked: list[int] = []

        def rows(name: str, offer: Tree, clients: np.ndarray) -> Tree:
            assert name == "m" and not tree.differences(offer, OFFER)
            assert all(home[client] == transport.rank for client in clients), "only of those who live here"
            asked.extend(clients.tolist())
            return rows_of(clients.tolist())

        ids = torch.tensor([choice[client] for client in receivers.tolist()])
        published: Messages | None = {"u": {"clients": ids}} if transport.rank == 0 else None
        reply = send_down(transport, WHAT, published, assigned, offers=Offers(np.array(home), rows))
        mine = {int(one): reply.for_clients(np.array([one])) for group in assigned[transport.rank] for one in group}
        return mine, asked, transport.counter.take("data")[0]

    return run_ranks(ranks, work)


def here(clients: np.ndarray, home: list[int], ranks: int) -> list[list[int]]:
    return [[int(client) for client in clients if home[client] == rank] for rank in range(ranks)]


@pytest.mark.parametrize("homes", HOMES)
@pytest.mark.parametrize("choice", CHOICES)
def test_each_receiver_gets_what_those_offer_that_were_chosen_for_it(choice: str, homes: str) -> None:
    (ranks, home), wanted = HOMES[homes], CHOICES[choice]
    results = deliver(wanted, homes)
    found = {client: message for mine, _, _ in results for client, message in mine.items()}
    assert found.keys() == wanted.keys()
    for client, ids in wanted.items():
        message = found[client]["u"]
        assert message["clients"].tolist() == [ids] and [*message] == ["clients", "m"]
        for path, rows in tree.leaves(rows_of(ids)):
            received = tree.at(message["m"], path)[0]
            assert received.dtype == rows.dtype and torch.equal(received, rows), path

    travels = {  # once to each rank that wants it
        (home[client], rank, client)
        for rank, mine in enumerate(here(np.array(sorted(wanted)), home, ranks))
        for receiver in mine
        for client in wanted[receiver]
        if client != NOBODY and home[client] != rank
    }
    assert results[0][2] == SIZE * len(travels) + (ranks - 1) * 8 * M * len(wanted)
    receivers = [np.array(one, np.int64) for one in here(np.array(sorted(wanted)), home, ranks)]
    calls = chosen_calls(WHAT, receivers, np.array(home))
    assert wire_bytes(calls, "mpi")[1] >= results[0][2]
    received = [SIZE * sum(to == rank for _, to, _ in travels) for rank in range(ranks)]
    assert all(most >= size for most, size in zip(calls[1].received, received, strict=True))


def test_ranks_that_want_the_same_are_sent_one_packed_copy() -> None:
    """Three ranks want the models of three clients: each is asked for once, by the only set that it is in."""
    asked = [ids for _, ids, _ in deliver(CHOICES["the same for all"], "one client each")]
    assert asked == [[], [], [], [2], [3], [], [5]]


def test_the_bound_is_what_travels_where_everybody_is_wanted_and_lives_elsewhere() -> None:
    home = np.array([1, 1, 2, 2, 3, 3])
    receivers = [np.array(one, np.int64) for one in ([], [0], [2, 3], [])]
    ids, models = chosen_calls(WHAT, receivers, home)
    assert ids.sizes == (8 * M * 3,) * 4
    assert models.received == (0, SIZE * M, SIZE * 4, 0), "no more than there are elsewhere"
    assert models.answers and 0 <= sum(models.sizes) - sum(models.received) <= len(home)
    assert models.sizes[0] == 0 and models.sizes[3] > max(models.sizes[1:3]), "by the clients of a rank"


@pytest.mark.parametrize("wrong", [N, -2])
def test_whoever_is_no_client_is_refused(wrong: int) -> None:
    published: Messages = {"u": {"clients": torch.tensor([[0, wrong, NOBODY]])}}
    offers = Offers(np.zeros(N, np.int64), lambda *_: rows_of([0]))
    with pytest.raises(RunError, match=rf"chose client {wrong} for its message 'u'; allowed are 0 to 5, and NOBODY"):
        send_down(InProcessTransport(), WHAT, published, [[np.array([1])]], offers=offers)
