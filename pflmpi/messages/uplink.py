"""The uplink: folds the participants' messages exactly, in slices, or gathers them on rank 0 in client order."""

from dataclasses import dataclass

import numpy as np
import torch

from pflmpi import tree
from pflmpi.learning.task import HOST
from pflmpi.messages.declared import Declared
from pflmpi.messages.deliver import deliver, delivery_traffic, merge_rows
from pflmpi.messages.device_sum import OnDevice
from pflmpi.messages.exact import OnHost
from pflmpi.messages.fold import Fold
from pflmpi.messages.groups import ClientGroup, clients_by_rank, clients_per_rank
from pflmpi.messages.kinds import ClassMeans, Messages, Updates, Uplink, tensor
from pflmpi.messages.slices import cut_slices
from pflmpi.messages.traffic import Traffic
from pflmpi.transports.base import Transport
from pflmpi.tree import Tree


@dataclass(frozen=True)
class Gathered:
    """Messages of which rank 0 gets rows of all participants: one of each, or one of each class of each."""

    like: Tree  # the template of a row, by message
    clients: np.ndarray  # [n] the client of each row, in the order of clients and classes
    home: np.ndarray  # [n] its rank
    wanted: list[np.ndarray]  # of each rank, the rows that it gets: all on rank 0, none on others; see `deliver`


def send_up(
    transport: Transport,
    declared: Declared,
    ups: Updates,
    assigned: list[list[ClientGroup]],
    device: torch.device = HOST,
) -> Messages | None:
    """Folds or gathers the participants' messages on rank 0, in client order; returns None on other ranks.

    Args:
        ups: for each group computed here, the clients and their messages with a leading client axis; those that are
            folded may be on a GPU.
        assigned: the groups of participants of each rank.
        device: of this rank, on which messages are added.

    Raises:
        RunError: a message that was not declared, differs from its declaration, or is missing.
    """
    for clients, messages in ups:
        declared.check_up(messages, len(clients))
    with transport.counting():
        adds = OnHost() if device.type == "cpu" else OnDevice(device)
        received = Fold(declared, cut_slices(declared.entries, assigned), assigned, adds).over(transport, ups)
        for gathered in list_gathered(declared, assigned):
            rows = _gather(transport, declared, ups, gathered)
            if received is not None:
                received.update((name, tree.part(rows, name)) for name in rows)
    return received


def up_calls(declared: Declared, assigned: list[list[ClientGroup]]) -> list[Traffic]:
    """Returns the transport calls of `send_up`."""
    gathered = list_gathered(declared, assigned)
    deliveries = (delivery_traffic(rows.wanted, rows.home, rows.like, down=False) for rows in gathered)
    return [*cut_slices(declared.entries, assigned).calls, *deliveries]


def list_gathered(declared: Declared, assigned: list[list[ClientGroup]]) -> list[Gathered]:
    """Lists what rank 0 gathers: messages with one row of each participant, and with one of each class of each."""
    clients = clients_by_rank(assigned)
    order = np.argsort(clients, kind="stable")
    participants, home = clients[order], np.repeat(np.arange(len(assigned)), clients_per_rank(assigned))[order]
    one_row, class_rows = Tree(), Tree()
    for name, kind in declared.gathered.items():
        if isinstance(kind, ClassMeans):
            class_rows[name] = _class_row_template(kind)
        else:
            one_row[name] = kind.like
    gathered, no_rows = list[Gathered](), np.empty(0, np.int64)
    for like, counts in ((one_row, np.ones_like(participants)), (class_rows, declared.holds[participants].sum(1))):
        if like:
            wanted = [np.arange(counts.sum()), *[no_rows] * (len(assigned) - 1)]
            gathered.append(Gathered(like, np.repeat(participants, counts), np.repeat(home, counts), wanted))
    return gathered


def _class_row_template(kind: ClassMeans) -> Tree:
    """Returns the template of what a client sends of a class that it holds."""
    label = tensor(dtype=torch.int32)
    row: Tree = {"labels": label, "means": tensor(kind.num_features)}
    return {**row, "counts": label} if kind.counts else row


def _gather(transport: Transport, declared: Declared, ups: Updates, gathered: Gathered) -> Tree:
    """Gathers the rows of all ranks on rank 0; those of `ClassMeans` get the client of each."""
    kinds = declared.gathered
    parts: list[tuple[np.ndarray, Tree]] = []
    for clients, messages in ups:
        holds = declared.holds[clients]
        group_rows: Tree = {name: _select_sent(kinds[name], messages[name], holds) for name in gathered.like}
        parts.append((np.flatnonzero(np.isin(gathered.clients, clients)), group_rows))

    def rows_here(numbers: np.ndarray) -> Tree:
        return merge_rows(numbers, gathered.like, parts)

    rows = deliver(transport, gathered.wanted, gathered.home, rows_here, gathered.like, down=False)
    for name in rows:
        if isinstance(kinds[name], ClassMeans):
            tree.part(rows, name)["clients"] = torch.from_numpy(gathered.clients)
    return rows


def _select_sent(kind: Uplink, message: Tree, holds: np.ndarray) -> Tree:
    """Returns what the clients of a group send of a message [m, ...]; holds: bool [m, K]."""
    if not isinstance(kind, ClassMeans):
        return message
    held = torch.from_numpy(holds)
    names = ("means", "counts") if kind.counts else ("means",)
    labels = torch.from_numpy(np.nonzero(holds)[1].astype(np.int32))
    return {"labels": labels, **{name: tree.leaf(message, name)[held] for name in names}}
