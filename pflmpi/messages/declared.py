"""What an algorithm declared to send, with what is needed to count it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeGuard

import numpy as np
import torch

from pflmpi import tree
from pflmpi.errors import RunError
from pflmpi.messages import kinds
from pflmpi.messages.entries import Entries
from pflmpi.messages.kinds import (
    Centres,
    Chosen,
    ClassMeans,
    Compared,
    Messages,
    Mixed,
    Offered,
    OneOf,
    Own,
    OwnClasses,
    Rows,
    Shared,
    Sum,
    Uplink,
)
from pflmpi.tree import Tree


@dataclass(frozen=True)
class Declared:
    """What an algorithm declared, and who holds which classes.

    Attributes:
        up, down: messages by name.
        holds: [N, K] bool.
        num_train: [N] training samples.
    """

    up: dict[str, Uplink]
    down: dict[str, Shared]
    holds: np.ndarray
    num_train: np.ndarray

    @property
    def compared(self) -> dict[str, Compared]:
        """The messages up that are compared, leaf by leaf."""
        return {name: kind for name, kind in self.up.items() if isinstance(kind, Compared)}

    @property
    def centres(self) -> dict[str, Centres]:
        """The server's own trees that are compared with them."""
        return {name: kind for name, kind in self.up.items() if isinstance(kind, Centres)}

    @cached_property
    def folded(self) -> dict[str, Sum]:
        """The messages up of which rank 0 needs sums, by sorted names."""
        return {name: kind for name, kind in sorted(self.up.items()) if is_folded(kind)}

    @cached_property
    def kept(self) -> dict[str, Uplink]:
        """The messages up that rank 0 needs from each participant, by sorted names."""
        return {name: kind for name, kind in sorted(self.up.items()) if isinstance(kind, ClassMeans | Rows)}

    @cached_property
    def entries(self) -> Entries:
        """Those that are folded, as one vector."""
        return Entries.of(self.folded)

    @property
    def mixed(self) -> dict[str, Mixed]:
        """The messages down that are mixed of those."""
        return {name: kind for name, kind in self.down.items() if isinstance(kind, Mixed)}

    @property
    def chosen(self) -> dict[str, Chosen]:
        """The messages down that other clients offer."""
        return {name: kind for name, kind in self.down.items() if isinstance(kind, Chosen)}

    @property
    def one_of(self) -> dict[str, OneOf]:
        """The messages down that are one of a few."""
        return {name: kind for name, kind in self.down.items() if isinstance(kind, OneOf)}

    @property
    def returned(self) -> dict[str, Uplink]:
        """The messages up that `client_update` returns: all but those that are in its state or the server's."""
        return {name: kind for name, kind in self.up.items() if not isinstance(kind, Offered | Centres)}

    def up_bytes(self, clients: np.ndarray) -> np.ndarray:
        """Logical uplink bytes [m] of the given clients."""
        return self._bytes(self.up, clients)

    def down_bytes(self, clients: np.ndarray) -> np.ndarray:
        """Logical downlink bytes [m] of the given clients."""
        return self._bytes(self.down, clients)

    def returned_bytes(self, clients: np.ndarray) -> np.ndarray:
        """Bytes [m] of what `client_update` returns for the given clients to send."""
        return self._bytes(self.returned, clients)

    def folded_bytes(self, participants: np.ndarray) -> int:
        """Bytes of the messages of a round on rank 0, once those that are folded are; without those compared."""
        once = sum(tree.num_bytes(kind.like) for kind in self.folded.values())
        return once + int(self._bytes(self.kept, participants).sum())

    def check_up(self, messages: Messages, clients: int) -> None:
        """Raise `RunError` unless the uplinks [clients, ...] are what was declared, with nothing missing or more."""
        classes = self.holds.shape[1]
        expected = {name: kinds.with_rows(_one_uplink(kind, classes), clients) for name, kind in self.returned.items()}
        uncounted = [name for name, kind in self.up.items() if isinstance(kind, ClassMeans) and not kind.counts]
        # `client.class_means` always gives counts; where they are not declared they stay with the client.
        found = {
            name: {key: leaf for key, leaf in value.items() if key != "counts"} if name in uncounted else value
            for name, value in messages.items()
        }
        _refuse("uplink", found, expected)

    def check_down(self, messages: Messages, receivers: int) -> None:
        """Raise `RunError` unless what was published is what was declared, but for what is mixed."""
        classes = self.holds.shape[1]
        expected = {
            name: _published(kind, receivers, classes)
            for name, kind in self.down.items()
            if not isinstance(kind, Mixed)
        }
        _refuse("downlink", messages, expected)

    def _bytes(self, kinds: Mapping[str, Uplink | Shared], clients: np.ndarray) -> np.ndarray:
        without, with_one = (sum(kind.client_bytes(held) for kind in kinds.values()) for held in (0, 1))
        found = np.full(len(clients), without, np.int64)
        if with_one != without:  # each class that a client holds adds as much
            found += (with_one - without) * self.holds[clients].sum(1)
        return found


def is_folded(kind: Uplink) -> TypeGuard[Sum]:
    """Whether rank 0 needs only the sum of such messages."""
    return isinstance(kind, Sum) and not isinstance(kind, Rows | Compared | Centres | Offered)


def _one_uplink(kind: Uplink, classes: int) -> Tree:
    """The template of what `client_update` returns for one client."""
    if not isinstance(kind, ClassMeans):
        return kind.like
    like: Tree = {"means": kinds.tensor(classes, kind.num_features)}
    return {**like, "counts": kinds.tensor(classes, dtype=torch.int32)} if kind.counts else like


def _published(kind: Shared, receivers: int, classes: int) -> Tree:
    """The template of what `publish` returns for so many receivers."""
    if isinstance(kind, Chosen):
        return kinds.with_rows({"clients": kind.like["clients"]}, receivers)
    if isinstance(kind, OneOf):
        return kind.published(kind.count, receivers)
    rows = {Own: receivers, OwnClasses: classes}
    return kinds.with_rows(kind.like, rows[type(kind)]) if type(kind) in rows else kind.like


def _refuse(way: Literal["uplink", "downlink"], found: Messages, expected: Messages) -> None:
    wrong = tree.differences(dict(found), dict(expected))
    if wrong:
        raise RunError(
            f"the algorithm's {way} is not what it declares (found against declared): {'; '.join(wrong)}; "
            f"nothing of it was sent; declare it in `{way}`, or return it as declared"
        )
