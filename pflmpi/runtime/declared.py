"""What an algorithm declared to send, with what is needed to count it."""

from dataclasses import dataclass

import numpy as np

from pflmpi.message import Shared, Uplink


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

    def up_bytes(self, clients: np.ndarray) -> np.ndarray:
        """Return the logical uplink bytes [m] of the given clients."""
        held = self.holds[clients].sum(1)
        return np.array([sum(kind.client_bytes(int(n)) for kind in self.up.values()) for n in held], np.int64)

    def down_bytes(self, clients: np.ndarray) -> np.ndarray:
        """Return the logical downlink bytes [m] of the given clients."""
        held = self.holds[clients].sum(1)
        return np.array([sum(kind.client_bytes(int(n)) for kind in self.down.values()) for n in held], np.int64)
