"""Groups of clients: those of one cohort that a rank computes in one call."""

from collections.abc import Sequence

import numpy as np

ClientGroup = np.ndarray  # ascending client ids that are computed in one call

_NOBODY = np.empty(0, np.int64)  # of most ranks, where there are many


def clients_of(groups: Sequence[ClientGroup]) -> np.ndarray:
    """The ascending ids of all clients in some groups."""
    return np.sort(np.concatenate(groups)) if len(groups) else _NOBODY
