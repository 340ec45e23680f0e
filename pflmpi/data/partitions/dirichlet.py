"""Class proportions over clients from a Dirichlet distribution."""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from pflmpi.data.partitions.by_label import assign_samples, count_classes, draw_holders, require_samples
from pflmpi.data.partitions.pfllib import Draw, Split, cut_among_holders, cut_by_dirichlet
from pflmpi.data.splits import apportion
from pflmpi.errors import DataError


def dirichlet(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    beta: Annotated[float, Field(gt=0, description="concentration; smaller is more uneven")],
    balanced_cap: Annotated[
        bool, Field(description="give nothing more to a client that has its even share of all samples")
    ] = False,
    min_samples: Annotated[int, Field(ge=1, description="samples that every client has at least")] = 10,
    max_tries: Annotated[int, Field(ge=1, le=1_000_000, description="draws before giving up")] = 1000,
    proportions: Annotated[
        Literal["of_classes", "of_clients"],
        Field(description="drawn for each class over the clients, or for each client over the classes"),
    ] = "of_classes",
    draw: Draw = "run",
) -> list[np.ndarray] | list[Split]:
    """All labels for all clients, in proportions from Dir(beta).

    Proportions are drawn for each class over the clients. Complete and disjoint. Redrawn until every client has
    `min_samples`. Widely used code has `balanced_cap`, the textbook partition does not. `draw: pfllib` with
    `balanced_cap` and `min_samples: 40` is that of FedFCD's experiments.

    With `proportions: of_clients` each client draws its own over the classes, p_i ~ Dir(beta), as equations 11 and 12
    of FedFCD describe; a class is cut among the clients in proportion to their p_i, so that every sample is given out.
    """
    if draw == "pfllib":
        if proportions != "of_classes":
            raise DataError(f"partition.proportions = {proportions} with partition.draw = pfllib, which has of_classes")
        return cut_by_dirichlet(labels, clients, beta, balanced_cap, min_samples, max_tries)
    classes, sizes = count_classes(labels, clients)
    holds = np.ones((clients, len(classes)), dtype=bool)
    by_client = proportions == "of_clients"
    counts = draw_until_enough(sizes, holds, beta, balanced_cap, min_samples, max_tries, rng, "beta", by_client)
    return assign_samples(labels, counts, rng)


def draw_until_enough(
    sizes: np.ndarray,
    holds: np.ndarray,
    concentration: float,
    cap: bool,
    min_samples: int,
    max_tries: int,
    rng: np.random.Generator,
    symbol: str,
    by_client: bool = False,
) -> np.ndarray:
    """Repeats `draw_counts`, at most `max_tries` times, until every client has `min_samples`.

    Args:
        symbol: the configuration's name of the concentration.

    Raises:
        DataError: no such draw, or too few samples for one.
    """
    clients, total = len(holds), int(sizes.sum())
    require_samples(total, clients, min_samples)
    best = 0
    for _ in range(max_tries):
        counts = draw_counts(sizes, holds, concentration, cap, rng, by_client)
        best = max(best, int(counts.sum(axis=1).min()))
        if best >= min_samples:
            return counts
    raise DataError(
        f"{max_tries} draws with {symbol} = {concentration} gave no partition of {total} samples in which each of "
        f"{clients} clients has {min_samples} (the best left one with {best}); raise partition.{symbol}, "
        f"lower partition.min_samples or partition.clients, or raise partition.max_tries"
    )


def draw_counts(
    sizes: np.ndarray,
    holds: np.ndarray,
    concentration: float,
    cap: bool,
    rng: np.random.Generator,
    by_client: bool = False,
) -> np.ndarray:
    """Draws counts int64 [N, K]: for each class, proportions over its holders from a Dirichlet distribution.

    With `cap`, a client that already has n/N samples gets none of the following classes; if all holders of a class have
    that many, it goes to all of them, since every sample is given out.

    Args:
        sizes: samples of each class [K].
        holds: bool [N, K], at least one holder for each class.
        rng: drawn from once for each class, or once for each client.
        by_client: draw for each client, over the classes, instead of for each class, over its holders.
    """
    counts = np.zeros(holds.shape, dtype=np.int64)
    owned = np.zeros(len(holds), dtype=np.int64)
    even_share = sizes.sum() / len(holds)
    client_shares = rng.dirichlet(np.full(len(sizes), concentration), len(holds)) if by_client else None
    for column, size in enumerate(sizes):
        holders = np.flatnonzero(holds[:, column])
        if client_shares is None:
            shares = rng.dirichlet(np.full(len(holders), concentration))
        else:
            shares = client_shares[holders, column]
        below_cap = owned[holders] < even_share
        if cap and below_cap.any():
            # Renormalised by apportion: a part of a Dirichlet draw is a Dirichlet draw over that part.
            shares = np.where(below_cap, shares, 0.0)
            shares = shares if shares.sum() > 0 else below_cap.astype(np.float64)
        counts[holders, column] = apportion(int(size), shares)
        owned += counts[:, column]
    return counts


def exdir(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    classes_per_client: Annotated[int, Field(ge=1, description="C, labels that every client draws")],
    alpha: Annotated[float, Field(gt=0, description="concentration; smaller is more uneven")],
    balanced_cap: Annotated[
        bool, Field(description="give nothing more to a client that has its even share of all samples")
    ] = True,
    min_samples: Annotated[int, Field(ge=1, description="samples that every client has at least")] = 10,
    max_tries: Annotated[int, Field(ge=1, le=1_000_000, description="draws of each level before giving up")] = 5000,
    draw: Draw = "run",
) -> list[np.ndarray] | list[Split]:
    """Few labels for each client, in proportions from Dir(alpha).

    Complete and disjoint. Level 1: every client draws C distinct labels; all are redrawn until each label has at least
    max(1, C N // K // 2) holders. Level 2: for each label, proportions over its holders from Dir(alpha); redrawn until
    every client has `min_samples`. A client may get no sample of a label that it drew.

    FedGMH's text has no cap and no floor; its repository has PFLlib's generator, with both. Where all holders of a
    label already have their share, that code divides by zero; here the label goes to all its holders. `draw: pfllib`
    is that of the repository.

    Reference: Li and Lyu, 2023, arXiv 2311.03154.
    """
    if draw == "pfllib":
        return cut_among_holders(labels, clients, classes_per_client, alpha, balanced_cap, min_samples, max_tries)
    classes, sizes = count_classes(labels, clients)
    holds = draw_labels(clients, classes_per_client, len(classes), max_tries, rng)
    counts = draw_until_enough(sizes, holds, alpha, balanced_cap, min_samples, max_tries, rng, "alpha")
    return assign_samples(labels, counts, rng)


def draw_labels(
    clients: int, classes_per_client: int, num_classes: int, max_tries: int, rng: np.random.Generator
) -> np.ndarray:
    """Draws `classes_per_client` labels for every client, bool [N, K]; see `draw_holders`."""
    # The first C of a random order of the labels, for every client: C distinct labels, all sets equally likely.
    return draw_holders(
        clients,
        classes_per_client,
        num_classes,
        max_tries,
        lambda: np.argsort(rng.random((clients, num_classes)), axis=1)[:, :classes_per_client],
    )
