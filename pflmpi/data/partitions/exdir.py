"""Extended Dirichlet: few labels for each client, and Dirichlet proportions among the holders of a label."""

from typing import Annotated

import numpy as np
from pydantic import Field

from pflmpi.data.partitions.by_label import class_sizes, hand_out, require_classes
from pflmpi.data.partitions.dirichlet import draw_until_enough
from pflmpi.errors import DataError


def exdir(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    classes_per_client: Annotated[int, Field(ge=1, description="C, labels that every client draws")],
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False, description="concentration; smaller is more uneven")],
    balanced_cap: Annotated[
        bool, Field(description="give nothing more to a client that has its even share of all samples")
    ] = True,
    min_samples: Annotated[int, Field(ge=1, description="samples that every client has at least")] = 10,
    max_tries: Annotated[int, Field(ge=1, le=1_000_000, description="draws of each level before giving up")] = 5000,
) -> list[np.ndarray]:
    """Few labels for each client, in proportions from Dir(alpha).

    Complete and disjoint. Level 1: every client draws C distinct labels; all are redrawn until each label has at least
    max(1, C N // K // 2) holders. Level 2: for each label, proportions over its holders from Dir(alpha); redrawn until
    every client has `min_samples`. A client may get no sample of a label that it drew.

    FedGMH's text has no cap and no floor; widely used code has both, and that the published numbers were made so is a
    reading. Where all holders of a label already have their share, that code divides by zero; here the label goes to
    all its holders.

    Reference: Li and Lyu, 2023, arXiv 2311.03154.

    Args:
        classes_per_client: C.
        alpha: concentration of the Dirichlet distribution.
        balanced_cap: stop giving to a client that has n/N samples.
        min_samples: floor for each client.
        max_tries: bound on the redraws of each level.
    """
    classes, sizes = class_sizes(labels, clients)
    holds = draw_labels(clients, classes_per_client, len(classes), max_tries, rng)
    counts = draw_until_enough(sizes, holds, alpha, balanced_cap, min_samples, max_tries, rng, "alpha")
    return hand_out(labels, counts, rng)


def draw_labels(
    clients: int, classes_per_client: int, num_classes: int, max_tries: int, rng: np.random.Generator
) -> np.ndarray:
    """Holders bool [N, K]: `classes_per_client` labels in every row, enough holders in every column (level 1).

    Raises:
        DataError: impossible numbers, or no such draw among `max_tries`.
    """
    require_classes(clients, classes_per_client, num_classes)
    needed = max(1, classes_per_client * clients // num_classes // 2)
    for _ in range(max_tries):
        # The first C of a random order of the labels, for every client: C distinct labels, all sets equally likely.
        drawn = np.argsort(rng.random((clients, num_classes)), axis=1)[:, :classes_per_client]
        holds = np.zeros((clients, num_classes), dtype=bool)
        np.put_along_axis(holds, drawn, True, axis=1)
        if holds.sum(axis=0).min() >= needed:
            return holds
    raise DataError(
        f"{max_tries} draws of {classes_per_client} labels for each of {clients} clients gave no set in which each of "
        f"{num_classes} labels has {needed} holders; raise partition.classes_per_client, partition.clients or "
        f"partition.max_tries, or use the partition 'pathological', which deals the labels"
    )
