"""The messages that an algorithm declares: their templates, sizes and checks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeGuard

import numpy as np
import torch

from pflmpi import tree
from pflmpi.errors import RunError
from pflmpi.messages import kinds
from pflmpi.messages.kinds import ClassMeans, Messages, Own, OwnClasses, Rows, Shared, Sum, Uplink
from pflmpi.messages.slices import Entries
from pflmpi.messages.uplink_transforms import UplinkConfig, sent_bytes
from pflmpi.tree import Tree


@dataclass(frozen=True)
class Declared:
    """The declared messages, and who holds which classes.

    Attributes:
        up, down: messages by name.
        holds: [N, K] bool.
        num_train: [N] training samples.
        transforms: what clients do to what they send.
    """

    up: dict[str, Uplink]
    down: dict[str, Shared]
    holds: np.ndarray
    num_train: np.ndarray
    transforms: UplinkConfig = field(default_factory=UplinkConfig)

    @cached_property
    def folded(self) -> dict[str, Sum]:
        """The messages up of which rank 0 needs sums, by sorted names."""
        return {name: kind for name, kind in sorted(self.up.items()) if is_folded(kind)}

    @cached_property
    def gathered(self) -> dict[str, Uplink]:
        """The messages up that rank 0 needs from each participant, by sorted names."""
        return {name: kind for name, kind in sorted(self.returned.items()) if not is_folded(kind)}

    @cached_property
    def entries(self) -> Entries:
        """The messages that are folded, as one vector."""
        return Entries.of(self.folded)

    @property
    def returned(self) -> dict[str, Uplink]:
        """The messages up that `client_update` returns: all but those that stay in its state."""
        return {name: kind for name, kind in self.up.items() if not (isinstance(kind, Rows) and kind.kept)}

    @cached_property
    def answers(self) -> dict[str, Own]:
        """The messages down that answer the participants, by sorted names."""
        return {name: kind for name, kind in sorted(self.down.items()) if isinstance(kind, Own) and kind.kept}

    @cached_property
    def published(self) -> dict[str, Shared]:
        """The messages down that `publish` returns, by sorted names."""
        return {name: kind for name, kind in sorted(self.down.items()) if name not in self.answers}

    @property
    def of_clients(self) -> dict[str, Own]:
        """The messages down that are made of rows that clients keep, by name."""
        return {name: kind for name, kind in self.published.items() if isinstance(kind, Own) and kind.of}

    def up_bytes(self, clients: np.ndarray) -> np.ndarray:
        """Logical uplink bytes [m] of the given clients, of their transformed messages."""
        return self._by_classes(lambda held: sent_bytes(self.transforms, self.up, held), clients)

    def down_bytes(self, clients: np.ndarray) -> np.ndarray:
        """Logical downlink bytes [m] of the given clients."""
        return self._bytes(self.down, clients)

    def returned_bytes(self, clients: np.ndarray) -> np.ndarray:
        """Bytes [m] of what `client_update` returns for the given clients, which ranks send as it is."""
        return self._bytes(self.returned, clients)

    def folded_bytes(self, participants: np.ndarray) -> int:
        """Bytes of the messages of a round on rank 0, once those that are folded are."""
        once = sum(tree.num_bytes(kind.like) for kind in self.folded.values())
        return once + int(self._bytes(self.gathered, participants).sum())

    @property
    def shared_bytes(self) -> int:
        """Bytes of the messages down that are the same for all."""
        return sum(tree.num_bytes(kind.like) for kind in self.down.values() if type(kind) is Shared)

    def rows_bytes(self, participants: int, receivers: int) -> dict[str, int]:
        """Bytes of the messages that rank 0 has of all participants or for all receivers at once, by name."""
        rows = {name: kind.like for name, kind in self.gathered.items() if isinstance(kind, Rows)}
        sizes = {name: participants * tree.num_bytes(like) for name, like in rows.items()}
        for name, kind in self.down.items():
            if isinstance(kind, Own) and not kind.of:
                sizes[name] = (participants if kind.kept else receivers) * tree.num_bytes(kind.like)
        return sizes

    def check_up(self, messages: Messages, clients: int) -> None:
        """Raise `RunError` unless the uplinks [clients, ...] are what was declared, with nothing missing or more."""
        classes = self.holds.shape[1]
        expected = {name: kinds.with_rows(_one_uplink(kind, classes), clients) for name, kind in self.returned.items()}
        uncounted = [name for name, kind in self.up.items() if isinstance(kind, ClassMeans) and not kind.counts]
        # `client.class_means` always gives counts; where they are not declared they stay with the client.
        sent = {
            name: {key: leaf for key, leaf in value.items() if key != "counts"} if name in uncounted else value
            for name, value in messages.items()
        }
        _refuse("uplink", sent, expected)

    def check_down(self, messages: Messages, receivers: int) -> None:
        """Raise `RunError` unless what was published is what was declared."""
        classes = self.holds.shape[1]
        expected = {name: _published(kind, receivers, classes) for name, kind in self.published.items()}
        _refuse("downlink", messages, expected)

    def check_answers(self, messages: Messages, participants: int) -> None:
        """Raise `RunError` unless the answers [participants, ...] are what was declared."""
        expected = {name: kinds.with_rows(kind.like, participants) for name, kind in self.answers.items()}
        _refuse("downlink", messages, expected)

    def _bytes(self, kinds: Mapping[str, Uplink | Shared], clients: np.ndarray) -> np.ndarray:
        return self._by_classes(lambda held: sum(kind.client_bytes(held) for kind in kinds.values()), clients)

    def _by_classes(self, num_bytes: Callable[[int], int], clients: np.ndarray) -> np.ndarray:
        """[m] of each client, given those of one that holds so many classes."""
        without, with_one = map(num_bytes, (0, 1))
        sizes = np.full(len(clients), without, np.int64)
        if with_one != without:  # each class that a client holds adds as much
            sizes += (with_one - without) * self.holds[clients].sum(1)
        return sizes


def is_folded(kind: Uplink) -> TypeGuard[Sum]:
    """Whether rank 0 needs only the sum of such messages."""
    return isinstance(kind, Sum) and not isinstance(kind, Rows)


def _one_uplink(kind: Uplink, classes: int) -> Tree:
    """The template of what `client_update` returns for one client."""
    if not isinstance(kind, ClassMeans):
        return kind.like
    like: Tree = {"means": kinds.tensor(classes, kind.num_features)}
    return {**like, "counts": kinds.tensor(classes, dtype=torch.int32)} if kind.counts else like


def _published(kind: Shared, receivers: int, classes: int) -> Tree:
    """The template of what `publish` returns for so many receivers."""
    if isinstance(kind, Own) and kind.of:
        return kinds.with_rows({"clients": kind.like["clients"]}, receivers)
    rows = {Own: receivers, OwnClasses: classes}
    return kinds.with_rows(kind.like, rows[type(kind)]) if type(kind) in rows else kind.like


def _refuse(way: Literal["uplink", "downlink"], messages: Messages, expected: Messages) -> None:
    wrong = tree.differences(dict(messages), dict(expected))
    if wrong:
        raise RunError(
            f"the algorithm's {way} is not what it declares (found against declared): {'; '.join(wrong)}; "
            f"nothing of it was sent; declare it in `{way}`, or return it as declared"
        )
