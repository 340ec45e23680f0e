"""Independent and identically distributed clients."""

from typing import Annotated

import numpy as np
from pydantic import Field

from pflmpi.data.partitions.by_label import draw_uneven_weights, require_samples
from pflmpi.data.splits import apportion, cut


def iid(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    balanced: Annotated[bool, Field(description="parts of equal size, instead of uneven ones")] = True,
) -> list[np.ndarray]:
    """A random part of all samples for each client.

    Complete and disjoint. Equal sizes differ by at most one sample; uneven ones are in proportion to a uniform draw
    from 0.1 to 1.
    """
    require_samples(len(labels), clients)
    weights = np.ones(clients) if balanced else draw_uneven_weights((clients,), rng)
    shuffled = rng.permutation(len(labels)).astype(np.int64)
    return [np.sort(part) for part in cut(shuffled, apportion(len(labels), weights, floor=1))]
