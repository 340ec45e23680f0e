"""The kinds of messages between the server and the clients, and their sizes.

An algorithm declares its messages with these kinds; the runtime sends exactly that. Every kind counts the
*logical* bytes of one client, as papers do: 4 for a float32, a label or a count.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from pflmpi import tree
from pflmpi.errors import ConfigError
from pflmpi.messages.groups import ClientGroup
from pflmpi.tree import Tree

Messages = dict[str, Tree]  # by name, as the algorithm declares them
Updates = list[tuple[ClientGroup, Messages]]  # of each group, its clients and their messages with a leading client axis
NOBODY = -1  # instead of a client's id


@dataclass(frozen=True)
class Sum:
    """Trees shaped `like` of float32, float64 or int64, added over the participants.

    Floats are added exactly and rounded once; a sum of int64 that may leave the type ends the run.
    """

    like: Tree

    def client_bytes(self, classes_held: int) -> int:
        """The logical bytes of one client's message."""
        return tree.num_bytes(self.like)


@dataclass(frozen=True)
class Mean(Sum):
    """Trees shaped `like`, averaged over the participants with weights n_i (`samples`) or 1 (`clients`).

    What is not floating, such as a counter or an index, is never averaged: it is that of the participant of lowest id.

    Attributes:
        is_change: what the transforms of `uplink` apply to. False: the difference to the message of the same name and
            form that the client has received, so the message is a model; without such a one they are refused. True: the
            message itself, which is a change already, whatever the client has received under its name.
    """

    by: Literal["samples", "clients"] = "samples"
    is_change: bool = False

    def __post_init__(self) -> None:
        if self.by not in ("samples", "clients"):
            raise ConfigError(f"Mean has by = {self.by!r}; allowed: samples, clients")


@dataclass(frozen=True)
class Rows(Sum):
    """One tree shaped `like` from every participant; the server sees them along a first axis [P, ...].

    Attributes:
        kept: each row stays with its client, as the part of its state of that name, for other clients (`Own.of`): the
            server sees nothing of it, and `client_update` does not return it again.
    """

    kept: bool = False


@dataclass(frozen=True)
class ClassMeans:
    """For the classes a client holds: label, mean feature [d] and, with `counts`, the number of samples.

    A client hands over `{"means": [K, d]}` (and `"counts": [K]`); only rows of held classes travel. The server
    gets `{"labels": [M], "means": [M, d], "clients": [M]}` (and `"counts": [M]`), in client and label order.
    """

    num_features: int
    counts: bool = True

    def client_bytes(self, classes_held: int) -> int:
        """The logical bytes of one client's message: `4 (d + 1)` for each class held, and 4 more with its count."""
        return classes_held * 4 * (self.num_features + 1 + self.counts)


@dataclass(frozen=True)
class Shared:
    """One tree shaped `like`, the same for every client."""

    like: Tree

    def client_bytes(self, classes_held: int) -> int:
        """The logical bytes that one client receives."""
        return tree.num_bytes(self.like)


@dataclass(frozen=True)
class Own(Shared):
    """One tree shaped `like` for each client; the server publishes rows [R, ...] for the R receivers.

    Attributes:
        kept: the rows are instead an answer [P, ...] to the participants, from `answer`; a client keeps its newest for
            its next training. Before, it has what `init_received` says; a newcomer gets the mean over all clients.
        of: name of a kept `Rows` message: a client receives the rows of M other clients, `like` being {"clients": [M],
            `of`: rows [M, ...]}. The server publishes {"clients": [R, M]} (int64), whose; `NOBODY` for rows of zeros.
    """

    kept: bool = False
    of: str = ""


@dataclass(frozen=True)
class OwnClasses(Shared):
    """One tree shaped `like` for each class; a client receives the classes it holds.

    The server publishes [K, ...]; a client sees [K, ...] with zeros where it does not hold the class.
    """

    def client_bytes(self, classes_held: int) -> int:
        """The logical bytes that one client receives."""
        return classes_held * tree.num_bytes(self.like)


Uplink = Sum | ClassMeans
Downlink = Shared


def as_messages(value: Tree) -> Messages:
    return {name: tree.part(value, name) for name in value}


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Makes a template leaf for a declaration: a shape and dtype without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def with_rows(like: Tree, rows: int) -> Tree:
    """Returns the template of `rows` trees shaped `like`, along a new first axis."""
    return tree.map(lambda leaf: tensor(rows, *leaf.shape, dtype=leaf.dtype), like)
