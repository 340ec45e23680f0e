"""Every client holds a few labels and nothing of the others."""

from typing import Annotated

import numpy as np
from pydantic import Field

from pflmpi.data.partitions.by_label import (
    Pairing,
    assign_samples,
    count_classes,
    cut_classes,
    deal_labels,
    draw_uneven_weights,
)
from pflmpi.data.partitions.pfllib import Draw, Split, cut_contiguously
from pflmpi.errors import DataError


def pathological(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    classes_per_client: Annotated[
        int,
        Field(ge=1, description="labels that every client holds, exactly; of the last ones at most with draw: pfllib"),
    ],
    balanced: Annotated[bool, Field(description="cut a label evenly among its holders, instead of unevenly")] = False,
    pairing: Pairing = "random",
    draw: Draw = "run",
) -> list[np.ndarray] | list[Split]:
    """The same number of labels for each client.

    A label is cut evenly or unevenly among its holders. Complete and disjoint. Labels are dealt so that their numbers
    of holders differ by at most one. Unevenly cut pieces have sizes in proportion to a uniform draw from 0.1 to 1, and
    at least one sample. `draw: pfllib` is that of FedFCD's experiments; unless K divides N classes_per_client, its last
    clients hold fewer labels.

    Papers do not say which labels meet in a client (`pairing`), and it decides results: FedFCD's published figures fit
    contiguous groups.
    """
    if draw == "pfllib":
        if pairing != "contiguous":
            raise DataError(
                f"partition.pairing = {pairing} with partition.draw = pfllib, whose groups are contiguous; set it to "
                "contiguous"
            )
        return cut_contiguously(labels, clients, classes_per_client, balanced)
    classes, sizes = count_classes(labels, clients)
    holds = deal_labels(clients, classes_per_client, len(classes), rng, pairing)
    weights = np.ones(holds.shape) if balanced else draw_uneven_weights(holds.shape, rng)
    return assign_samples(labels, cut_classes(classes, sizes, holds, weights, floor=1), rng)
