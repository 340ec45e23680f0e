"""Groups of clients: those of one cohort that a rank computes in one call."""

from collections.abc import Sequence

import numpy as np

Unit = np.ndarray  # ascending client ids that are computed in one call


def clients_of(units: Sequence[Unit]) -> np.ndarray:
    """Return the ascending ids of all clients in some units."""
    return np.sort(np.concatenate(units)) if len(units) else np.empty(0, np.int64)
