"""Rows reach the ranks that want them from where they live, once each; kept rows of clients among them."""

import numpy as np
import pytest
import torch

from pflmpi import tree
from pflmpi.errors import RunError
from pflmpi.messages.declared import Declared
from pflmpi.messages.downlink import Homes, down_calls, send_answers, send_down
from pflmpi.messages.kinds import NOBODY, Messages, Own, OwnClasses, Rows, tensor, with_rows
from pflmpi.messages.traffic import wire_bytes
from pflmpi.transports.inprocess import InProcessTransport
from pflmpi.tree import Tree
from thread_transport import run_ranks

N, M = 6, 3
LIKE: Tree = {"a": tensor(7), "b": {"c": tensor(3, 5), "d": tensor(dtype=torch.int32)}}
SIZE = 4 * (7 + 15 + 1)
KIND = Own({"clients": tensor(M, dtype=torch.int64), "m": with_rows(LIKE, M)}, of="m")
NOT_KNOWN = np.zeros((N, 1), bool), np.zeros(N, np.int64)
WHAT = Declared({"m": Rows(LIKE, kept=True)}, {"u": KIND}, *NOT_KNOWN)
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


def rows_of(clients):
    """What each client keeps; zeros for nobody."""
    values = torch.tensor([0.0 if client == NOBODY else 1.5 + client for client in clients])
    return tree.map(lambda leaf: (values.view(-1, *[1] * leaf.ndim) + torch.zeros(leaf.shape)).to(leaf.dtype), LIKE)


def groups(clients, home, ranks):
    """The receivers of each rank."""
    here = [[client for client in clients if home[client] == rank] for rank in range(ranks)]
    return [[np.array(receivers)] if receivers else [] for receivers in here]


def send(choice, homes):
    """Of each rank: messages by receiver, ids that it was asked for, bytes that travelled down."""
    ranks, home = HOMES[homes]
    assigned = groups(sorted(choice), home, ranks)

    def work(transport):
        requested_ids: list[int] = []

        def rows(name, like, clients):
            assert name == "m" and not tree.differences(like, LIKE)
            assert all(home[client] == transport.rank for client in clients), "only of those who live here"
            requested_ids.extend(clients.tolist())
            return rows_of(clients.tolist())

        ids = torch.tensor([choice[client] for client in sorted(choice)])
        published: Messages | None = {"u": {"clients": ids}} if transport.rank == 0 else None
        reply = send_down(transport, WHAT, published, assigned, homes=Homes(np.array(home), rows))
        messages = {
            int(receiver): reply.for_clients(np.array([receiver]))
            for group in assigned[transport.rank]
            for receiver in group
        }
        return messages, requested_ids, transport.take_moved()[0]

    return run_ranks(ranks, work)


@pytest.mark.parametrize("homes", HOMES)
@pytest.mark.parametrize("choice", CHOICES)
def test_each_receiver_gets_the_rows_of_those_chosen_for_it(choice, homes):
    (ranks, home), wanted = HOMES[homes], CHOICES[choice]
    results = send(wanted, homes)
    messages = {client: message for rank_messages, _, _ in results for client, message in rank_messages.items()}
    assert messages.keys() == wanted.keys()
    for client, ids in wanted.items():
        message = messages[client]["u"]
        assert message["clients"].tolist() == [ids] and [*message] == ["clients", "m"]
        for path, rows in tree.leaves(rows_of(ids)):
            received = tree.at(message["m"], path)[0]
            assert received.dtype == rows.dtype and torch.equal(received, rows), path
    travels = {  # once to each rank that wants it
        (home[client], home[receiver], client)
        for receiver, ids in wanted.items()
        for client in ids
        if client != NOBODY and home[client] != home[receiver]
    }
    assert results[0][2] == SIZE * len(travels) + (ranks - 1) * 8 * M * len(wanted)
    calls = down_calls(WHAT, groups(sorted(wanted), home, ranks), np.array(home))
    assert wire_bytes(calls)[1] >= results[0][2], "a bound: whose rows is known later"


def test_ranks_that_want_the_same_are_sent_one_packed_copy():
    """Three ranks want the models of three clients: each is asked for once, by the only set that it is in."""
    requested_ids = [ids for _, ids, _ in send(CHOICES["the same for all"], "one client each")]
    assert requested_ids == [[], [], [], [2], [3], [], [5]]


@pytest.mark.parametrize("wrong", [N, -2])
def test_whoever_is_no_client_is_refused(wrong):
    published: Messages = {"u": {"clients": torch.tensor([[0, wrong, NOBODY]])}}
    homes = Homes(np.zeros(N, np.int64), lambda *_: rows_of([0]))
    with pytest.raises(RunError, match=rf"chose client {wrong} for its message 'u'; allowed are 0 to 5, and NOBODY"):
        send_down(InProcessTransport(), WHAT, published, [[np.array([1])]], homes=homes)


@pytest.mark.parametrize("homes", HOMES)
def test_rows_of_the_server_reach_their_receivers_and_the_holders_of_their_classes(homes):
    (ranks, home), clients = HOMES[homes], [0, 2, 3, 5]
    holds = np.array([[1, 0, 0], [1, 1, 1], [0, 0, 1], [0, 0, 0], [1, 1, 1], [0, 0, 1]], bool)
    what = Declared({}, {"own": Own(LIKE), "k": OwnClasses(LIKE), "a": Own(LIKE, kept=True)}, holds, NOT_KNOWN[1])
    assigned = groups(clients, home, ranks)

    def work(transport):
        first, rank_groups = transport.rank == 0, assigned[transport.rank]
        published: Messages = {"own": rows_of([10, 12, 13, 15]), "k": rows_of([20, 21, 22])}
        reply = send_down(transport, what, published if first else None, assigned)
        moved = transport.take_moved()
        answers = send_answers(transport, what, {"a": rows_of([30, 32, 33, 35])} if first else None, assigned)
        return (
            {int(receiver): reply.for_clients(np.array([receiver])) for group in rank_groups for receiver in group},
            answers,
            moved,
        )

    results = run_ranks(ranks, work)
    for (messages, answers, _), rank_groups in zip(results, assigned, strict=True):
        here = rank_groups[0].tolist() if rank_groups else []
        assert_equal(answers["a"], rows_of([30 + client for client in here]))
        for client in here:
            assert_equal(messages[client]["own"], rows_of([10 + client]))
            row_ids = [20 + label if holds[client, label] else NOBODY for label in range(3)]
            assert_equal(tree.row(messages[client]["k"], 0), rows_of(row_ids))
    away = [group for rank_groups in assigned[1:] for group in rank_groups]
    rows = sum(len(group) + int(holds[group].any(0).sum()) for group in away)
    assert results[0][2] == (rows * SIZE, 0) == wire_bytes(down_calls(what, assigned, None))[::-1]


def assert_equal(actual, expected):
    assert not tree.differences(actual, expected)
    assert all(torch.equal(leaf, tree.at(expected, path)) for path, leaf in tree.leaves(actual))
