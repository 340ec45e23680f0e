"""Natural partition: one client for each writer."""

from typing import Annotated

import numpy as np
from pydantic import Field

from pflmpi.data.splits import cut
from pflmpi.errors import DataError


def writers(
    writers: np.ndarray,
    clients: int | None,
    rng: np.random.Generator,
    *,
    min_samples: Annotated[int, Field(ge=1, description="leave out writers with fewer samples")] = 1,
) -> list[np.ndarray]:
    """One client for each person who wrote samples.

    In the order of the writers' numbers. Disjoint; complete when all writers are clients. With fewer clients than
    writers, the clients are a random choice of those who have `min_samples`.
    """
    if clients is not None and clients < 1:
        raise DataError(f"partition.clients = {clients}: at least one client is needed")
    who, sizes = np.unique(writers, return_counts=True)
    enough = who[sizes >= min_samples]
    if len(enough) < (clients or 1):
        raise DataError(
            f"partition 'writers' has {len(enough)} writers with at least {min_samples} samples (of {len(who)}), "
            f"{clients or 1} are needed; lower partition.clients or partition.min_samples"
        )
    if clients is not None:
        enough = np.sort(rng.choice(enough, size=clients, replace=False))
    # One sort instead of a search for each writer, as there may be thousands.
    order = np.argsort(writers, kind="stable").astype(np.int64)
    by_writer = dict(zip(who.tolist(), cut(order, sizes), strict=True))
    return [by_writer[writer] for writer in enough.tolist()]
