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
from pflmpi.messages.kinds import ClassMeans, Downlink, Messages, Own, OwnClasses, Rows, Shared, Sum, Uplink
from pflmpi.messages.slices import Entries
from pflmpi.messages.uplink_transforms import UplinkConfig, sent_bytes
from pflmpi.tree import Tree


@dataclass(frozen=True)
class Declared:
    """The declared messages, and the classes and sample counts of the clients.

    Attributes:
        up, down: messages by name.
        holds: [N, K] bool, whether a client has training samples of a class.
        num_train: [N] training samples.
        transforms: that clients apply to what they send.
    """

    up: dict[str, Uplink]
    down: dict[str, Shared]
    holds: np.ndarray
    num_train: np.ndarray
    transforms: UplinkConfig = field(default_factory=UplinkConfig)

    @cached_property
    def folded(self) -> dict[str, Sum]:
        """Uplink messages of which rank 0 needs only the sum, by sorted names."""
        return {name: kind for name, kind in sorted(self.up.items()) if is_folded(kind)}

    @cached_property
    def gathered(self) -> dict[str, Uplink]:
        """Uplink messages that rank 0 needs from each participant, by sorted names."""
        return {name: kind for name, kind in sorted(self.returned.items()) if not is_folded(kind)}

    @cached_property
    def entries(self) -> Entries:
        """The folded messages as one vector."""
        return Entries.of(self.folded)

    @property
    def returned(self) -> dict[str, Uplink]:
        """Uplink messages that `client_update` returns: all but those that stay in a client's state."""
        return {name: kind for name, kind in self.up.items() if not (isinstance(kind, Rows) and kind.kept)}

    @cached_property
    def answers(self) -> dict[str, Own]:
        """Downlink messages that answer the participants, by sorted names."""
        return {name: kind for name, kind in sorted(self.down.items()) if isinstance(kind, Own) and kind.kept}

    @cached_property
    def published(self) -> dict[str, Shared]:
        """Downlink messages that `publish` returns, by sorted names."""
        return {name: kind for name, kind in sorted(self.down.items()) if name not in self.answers}

    @property
    def of_clients(self) -> dict[str, Own]:
        """Downlink messages made of rows that clients keep, by name."""
        return {name: kind for name, kind in self.published.items() if isinstance(kind, Own) and kind.of}

    def up_bytes(self, clients: np.ndarray) -> np.ndarray:
        """Logical uplink bytes [m] of the given clients, after the transforms."""
        return self._by_classes(lambda held: sent_bytes(self.transforms, self.up, held), clients)

    def down_bytes(self, clients: np.ndarray) -> np.ndarray:
        """Logical downlink bytes [m] of the given clients."""
        return self._bytes(self.down, clients)

    def returned_bytes(self, clients: np.ndarray) -> np.ndarray:
        """Bytes [m] of what `client_update` returns for the given clients, as ranks send it."""
        return self._bytes(self.returned, clients)

    def folded_bytes(self, participants: np.ndarray) -> int:
        """Bytes of a round's uplink messages on rank 0, after folding."""
        folded = sum(tree.num_bytes(kind.like) for kind in self.folded.values())
        return folded + int(self._bytes(self.gathered, participants).sum())

    @property
    def shared_bytes(self) -> int:
        """Bytes of the downlink messages that are the same for all."""
        return sum(tree.num_bytes(kind.like) for kind in self.down.values() if type(kind) is Shared)

    def rows_bytes(self, participants: int, receivers: int) -> dict[str, int]:
        """Bytes of the messages that rank 0 has of all participants, or for all receivers, at once, by name."""
        sizes = {
            name: participants * tree.num_bytes(kind.like)
            for name, kind in self.gathered.items()
            if isinstance(kind, Rows)
        }
        for name, kind in self.down.items():
            if isinstance(kind, Own) and not kind.of:
                sizes[name] = (participants if kind.kept else receivers) * tree.num_bytes(kind.like)
        return sizes

    def check_up(self, messages: Messages, clients: int) -> None:
        """Raises `RunError` unless the uplinks [clients, ...] are exactly what was declared."""
        classes = self.holds.shape[1]
        expected = {
            name: kinds.with_rows(_uplink_template(kind, classes), clients) for name, kind in self.returned.items()
        }
        sent = dict(messages)
        for name, kind in self.up.items():
            # `client.class_means` always returns counts; undeclared ones stay with the client.
            if name in sent and isinstance(kind, ClassMeans) and not kind.counts:
                sent[name] = {key: leaf for key, leaf in sent[name].items() if key != "counts"}
        _check_declared("uplink", sent, expected)

    def check_down(self, messages: Messages, receivers: int) -> None:
        """Raises `RunError` unless what was published is exactly what was declared."""
        classes = self.holds.shape[1]
        expected = {name: _downlink_template(kind, receivers, classes) for name, kind in self.published.items()}
        _check_declared("downlink", messages, expected)

    def check_answers(self, messages: Messages, participants: int) -> None:
        """Raises `RunError` unless the answers [participants, ...] are exactly what was declared."""
        expected = {name: kinds.with_rows(kind.like, participants) for name, kind in self.answers.items()}
        _check_declared("downlink", messages, expected)

    def _bytes(self, kinds: Mapping[str, Uplink | Shared], clients: np.ndarray) -> np.ndarray:
        return self._by_classes(lambda held: sum(kind.client_bytes(held) for kind in kinds.values()), clients)

    def _by_classes(self, num_bytes: Callable[[int], int], clients: np.ndarray) -> np.ndarray:
        """Bytes [m] of each client, from those by number of classes held, which are linear in that."""
        without_class, per_class = num_bytes(0), num_bytes(1) - num_bytes(0)
        sizes = np.full(len(clients), without_class, np.int64)
        if per_class:
            sizes += per_class * self.holds[clients].sum(1)
        return sizes


def is_folded(kind: Uplink) -> TypeGuard[Sum]:
    """Whether rank 0 needs only the sum of such a message."""
    return isinstance(kind, Sum) and not isinstance(kind, Rows)


def _uplink_template(kind: Uplink, classes: int) -> Tree:
    """Returns the template of what `client_update` returns for one client."""
    if not isinstance(kind, ClassMeans):
        return kind.like
    like: Tree = {"means": kinds.tensor(classes, kind.num_features)}
    return {**like, "counts": kinds.tensor(classes, dtype=torch.int32)} if kind.counts else like


def client_template(kind: Downlink, num_classes: int) -> Tree:
    """Returns the template of what one client receives."""
    return kinds.with_rows(kind.like, num_classes) if isinstance(kind, OwnClasses) else kind.like


def _downlink_template(kind: Shared, receivers: int, classes: int) -> Tree:
    """Returns the template of what `publish` returns for that many receivers."""
    if isinstance(kind, Own):
        like: Tree = {"clients": kind.like["clients"]} if kind.of else kind.like
        return kinds.with_rows(like, receivers)
    return client_template(kind, classes)


def _check_declared(direction: Literal["uplink", "downlink"], messages: Messages, expected: Messages) -> None:
    differences = tree.differences(dict(messages), dict(expected))
    if differences:
        raise RunError(
            f"the algorithm's {direction} is not what it declares (found against declared): {'; '.join(differences)}; "
            f"nothing of it was sent; declare it in `{direction}`, or return it as declared"
        )
