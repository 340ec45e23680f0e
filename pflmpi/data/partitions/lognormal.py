"""Few labels for each client, with sizes from a log-normal distribution."""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from pflmpi.data.partitions.by_label import (
    Pairing,
    assign_samples,
    count_classes,
    cut_classes,
    deal_labels,
    require_samples,
)
from pflmpi.errors import DataError


def lognormal(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    classes_per_client: Annotated[int, Field(ge=1, description="labels that every client holds, exactly")],
    sigma: Annotated[float, Field(ge=0, le=20, description="standard deviation of the logarithm of the sizes")],
    factor: Annotated[
        float, Field(ge=0, lt=1, description="the random factor on a size is uniform from 1 - factor to 1 + factor")
    ] = 0.5,
    min_samples: Annotated[int, Field(ge=1, description="samples that every client has at least")] = 10,
    pairing: Pairing = "random",
    sizes: Annotated[
        Literal["shares", "counts"],
        Field(description="the draws say how a label is cut among its holders, or are numbers of samples"),
    ] = "shares",
) -> list[np.ndarray]:
    """Few labels for each client, and sizes that vary widely.

    Sizes are log-normal with a random factor. Complete and disjoint. Labels are dealt so that their numbers of holders
    differ by at most one. A label is cut among its holders in proportion to exp(sigma Z) U, Z standard normal, U
    uniform from 1 - factor to 1 + factor, after each holder got the floor. pFedCFR names the log-normal draw and the
    random factor and gives no numbers; published generators of such partitions (pFedMe's, for one) have sigma = 2.
    `min_samples` is met by ceil(min_samples / classes_per_client) samples of each label.

    With `sizes: counts` a client has 2 (floor(exp(sigma Z)) A + B + 200) samples of a label, with whole numbers A from
    1 to 10 and B from 10 to 200, as long as there are any left, in the order of the clients; the others are nobody's;
    `factor` has no say. With `pairing: cyclic` and sigma = 2 this is another reading of pFedCFR's partition, near the
    generators of the time, which scale the log-normal draws to the size of the label first.
    """
    classes, available = count_classes(labels, clients)
    require_samples(len(labels), clients, min_samples)
    holds = deal_labels(clients, classes_per_client, len(classes), rng, pairing)
    if sizes == "counts":
        return assign_samples(labels, _draw_counts(available, holds, sigma, min_samples, rng), rng)
    weights = rng.lognormal(0.0, sigma, holds.shape) * rng.uniform(1 - factor, 1 + factor, holds.shape)
    floor = -(-min_samples // classes_per_client)
    return assign_samples(labels, cut_classes(classes, available, holds, weights, floor), rng)


def _draw_counts(
    available: np.ndarray, holds: np.ndarray, sigma: float, min_samples: int, rng: np.random.Generator
) -> np.ndarray:
    """Draws the counts int64 [N, K] of `sizes: counts`; `DataError` for a client with fewer than `min_samples`."""
    sizes = np.minimum(rng.lognormal(0.0, sigma, holds.shape), available.max()).astype(np.int64)
    wanted = 2 * (sizes * rng.integers(1, 11, holds.shape) + rng.integers(10, 201, holds.shape) + 200) * holds
    cumulated = np.minimum(wanted.cumsum(axis=0), available)
    counts: np.ndarray = np.diff(cumulated, axis=0, prepend=np.zeros((1, len(available)), np.int64))
    least = int(counts.sum(axis=1).argmin())
    if counts[least].sum() < min_samples:
        raise DataError(
            f"client {least} has {counts[least].sum()} samples and needs {min_samples}: the clients before it have "
            "taken those of its labels; lower partition.clients or partition.classes_per_client, or use more data"
        )
    return counts
