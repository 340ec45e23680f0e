"""What may travel between the server and the clients: the kinds of messages, and their size.

An algorithm declares its messages with these kinds; the runtime sends exactly that. Every kind knows the
*logical* bytes of one client, which is what papers count: float32 = 4, a label = 4, a count = 4.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from pflmpi import tree
from pflmpi.messages.groups import ClientGroup
from pflmpi.tree import Tree

Messages = dict[str, Tree]  # by name, as the algorithm declares them
Updates = list[tuple[ClientGroup, Messages]]  # of each group, its clients and their messages with a leading client axis
NOBODY = -1  # instead of a client's id

# --- from a client to the server ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Sum:
    """Trees shaped `like`, added over the participants."""

    like: Tree

    def client_bytes(self, classes_held: int) -> int:
        """The logical bytes of one client's message."""
        return tree.num_bytes(self.like)


@dataclass(frozen=True)
class Mean(Sum):
    """Trees shaped `like`, averaged over the participants with weights n_i (`samples`) or 1 (`clients`).

    What is not floating, such as a counter or an index, is never averaged: it is that of the participant of lowest id.
    """

    by: Literal["samples", "clients"] = "samples"


@dataclass(frozen=True)
class Rows(Sum):
    """One tree shaped `like` from every participant; the server sees them along a first axis [P, ...]."""


@dataclass(frozen=True)
class Compared(Sum):
    """One tree shaped `like` (floats) from every participant; the server sees how alike they are, and mixes them.

    In place of each leaf [...] it sees the inner products [P, P] (float64) of the participants' leaves. The leaves
    themselves stay with the ranks that compare them, so that no rank has whole models of all participants.

    Attributes:
        from_first: subtract the first participant's leaf before, so that distances of models that are near each other
            do not cancel.
    """

    from_first: bool = False


@dataclass(frozen=True)
class Centres(Sum):
    """Trees shaped `like` of the server's own that are compared too; it sees K weighted sums in their place.

    Its state has them under the name of the message, [K, ...]. They come after the participants', so that inner
    products are [P + K, P + K]; the weights [K, P + K] are from `mixing_weights`. Clients send nothing.

    Attributes:
        of: name of the `Compared` message, whose `like` is this one's.
    """

    of: str
    count: int  # K

    def client_bytes(self, classes_held: int) -> int:
        """None: they are the server's."""
        return 0


@dataclass(frozen=True)
class Offered(Sum):
    """One tree shaped `like` from every participant, for those others for whom the server chooses it (`Chosen`).

    It is what the client's state has under the name of the message; `client_update` does not return it again. It goes
    from the rank where the client lives to those that are to have it, so that no rank has those of all participants.
    """


@dataclass(frozen=True)
class ClassMeans:
    """For the classes a client holds: label, mean feature [d] and, with `counts`, the number of samples.

    A client hands over `{"means": [K, d]}` (and `"counts": [K]`); only rows of held classes travel. The server
    gets `{"labels": [M], "means": [M, d], "clients": [M]}` (and `"counts": [M]`), in client and label order.
    """

    num_features: int
    counts: bool = True

    def client_bytes(self, classes_held: int) -> int:
        """The logical bytes of one client's message: |S| (4 d + 4), and 4 |S| more for the counts."""
        return classes_held * 4 * (self.num_features + 1 + self.counts)


# --- from the server to a client ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Shared:
    """One tree shaped `like`, the same for every client."""

    like: Tree

    def client_bytes(self, classes_held: int) -> int:
        """The logical bytes that one client receives."""
        return tree.num_bytes(self.like)


@dataclass(frozen=True)
class Own(Shared):
    """One tree shaped `like` for each client; the server publishes rows [R, ...] for the R receivers."""


@dataclass(frozen=True)
class OneOf(Own):
    """One of K trees shaped `like` for each client; a tree goes to a rank once, also where many clients there get it.

    The server publishes {"choices": [K, ...], "chosen": [R] int64}, which of them each of the R receivers gets.
    """

    count: int  # K

    def published(self, choices: int, receivers: int) -> Tree:
        """The template of so many of the trees, and of what as many receivers get."""
        return {"choices": with_rows(self.like, choices), "chosen": tensor(receivers, dtype=torch.int64)}


@dataclass(frozen=True)
class Chosen(Own):
    """For each client what M others offer; the server says which, and zeros are in the place of `NOBODY`.

    The server publishes {"clients": [R, M]} (int64) for the R receivers.

    Attributes:
        like: what a client sees: {"clients": [M] int64, `of`: rows [M, ...]}.
        of: name of the `Offered` message.
    """

    of: str

    @property
    def offer(self) -> Tree:
        """The template of what one client offers."""
        return tree.map(lambda rows: tensor(*rows.shape[1:], dtype=rows.dtype), tree.part(self.like, self.of))


@dataclass(frozen=True)
class Mixed(Shared):
    """For each participant a weighted sum of what all participants have sent, with the weights of `mixing_weights`.

    It answers the participant's message; the client keeps it until it next takes part. Before, a client has what
    `init_received` says; a newcomer gets the mean of what all clients have.

    Attributes:
        of: name of the `Compared` message, whose `like` is this one's.
    """

    of: str


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
    """A tree of messages by name."""
    return {name: tree.part(value, name) for name in value}


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A template leaf for a declaration: a shape and dtype without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def with_rows(like: Tree, rows: int) -> Tree:
    """The template of `rows` trees shaped `like`, along a new first axis."""
    return tree.map(lambda leaf: tensor(rows, *leaf.shape, dtype=leaf.dtype), like)
