"""The partitions of PFLlib's generator, with its fixed seed: those of the papers that use it, with their splits.

NumPy's legacy generator draws for one label after another, and then a permutation for each client, to split it.
"""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from pflmpi.data.partitions.by_label import count_classes, draw_holders, require_classes, require_samples
from pflmpi.errors import DataError

SEED = 1  # in all its scripts
TRAIN_SHARE = 0.75

Split = tuple[np.ndarray, np.ndarray]  # a client's training and test samples, ascending

Draw = Annotated[
    Literal["run", "pfllib"],
    Field(
        description="run: from the run's seed; pfllib: as PFLlib's generator draws, from its seed whatever the run's, "
        "with its split of each client's samples, 75/25"
    ),
]


def cut_by_dirichlet(
    labels: np.ndarray, clients: int, beta: float, cap: bool, min_samples: int, max_tries: int
) -> list[Split]:
    """Shuffles each label's samples and cuts them at the cumulated proportions of a Dirichlet draw, rounded down.

    With `cap` (as in PFLlib) a client that has its even share of all samples takes no part in a draw. Everything is
    drawn again until every client has `min_samples` (PFLlib: 40), at most `max_tries` times.
    """
    rng = np.random.RandomState(SEED)
    holds = np.ones((clients, len(count_classes(labels, clients)[0])), bool)
    return _split(cut_labels(labels, holds, beta, cap, min_samples, max_tries, rng, "beta"), rng)


def cut_among_holders(
    labels: np.ndarray,
    clients: int,
    classes_per_client: int,
    alpha: float,
    cap: bool,
    min_samples: int,
    max_tries: int,
) -> list[Split]:
    """Cuts each label among the clients that drew it; every client draws `classes_per_client` (PFLlib's exdir).

    Labels are drawn again until each has half its mean number of holders. What rounding leaves, and a label whose
    holders all have their share, goes to the last of them: PFLlib divides by zero there, with the same result.
    """
    classes, _ = count_classes(labels, clients)
    rng = np.random.RandomState(SEED)

    def draw() -> np.ndarray:
        return np.array([rng.choice(len(classes), classes_per_client, replace=False) for _ in range(clients)])

    holds = draw_holders(clients, classes_per_client, len(classes), max_tries, draw)
    parts = cut_labels(labels, holds, alpha, cap, min_samples, max_tries, rng, "alpha")
    for samples in parts:
        rng.shuffle(samples)
    return _split(parts, rng)


def cut_labels(
    labels: np.ndarray,
    holds: np.ndarray,
    concentration: float,
    cap: bool,
    min_samples: int,
    max_tries: int,
    rng: np.random.RandomState,
    symbol: str,
) -> list[np.ndarray]:
    """Draws the samples of each client, those of a label in shuffled order; `holds` is bool [N, K]."""
    clients, classes = len(holds), np.unique(labels)
    require_samples(len(labels), clients, min_samples)
    for _ in range(max_tries):
        pieces: list[list[np.ndarray]] = [[] for _ in range(clients)]
        owned = np.zeros(clients, np.int64)
        for label, holders in zip(classes, holds.T, strict=True):
            samples, last = np.flatnonzero(labels == label), np.flatnonzero(holders)[-1]
            rng.shuffle(samples)
            shares = rng.dirichlet(np.full(clients, concentration))
            eligible = holders & (owned < len(labels) / clients) if cap else holders
            eligible = (eligible if eligible.any() else np.arange(clients) == last).astype(np.float64)
            shares = shares * eligible if (shares * eligible).any() else eligible  # PFLlib divides by zero here
            ends = (np.cumsum(shares / shares.sum()) * len(samples)).astype(np.int64)[:-1]
            ends[last:] = len(samples)
            for own, piece in zip(pieces, np.split(samples, ends), strict=True):
                own.append(piece)
            owned = np.array([sum(map(len, own)) for own in pieces])
        if owned.min() >= min_samples:
            return [np.concatenate(own) for own in pieces]
    raise DataError(
        f"{max_tries} draws of PFLlib's with {symbol} = {concentration} gave no partition in which each of {clients} "
        f"clients has {min_samples} samples; raise partition.{symbol} or partition.max_tries, or lower "
        "partition.min_samples"
    )


def cut_contiguously(labels: np.ndarray, clients: int, classes_per_client: int, balanced: bool) -> list[Split]:
    """Gives each label to the first ceil(clients classes_per_client / K) clients that have too few labels.

    They get consecutive samples: equal numbers, or uniform draws from a tenth of the even share (or PFLlib's smallest
    client over K) up to it; the last one gets the rest.
    """
    classes, sizes = count_classes(labels, clients)
    require_classes(clients, classes_per_client, len(classes))
    rng = np.random.RandomState(SEED)
    wanted = np.full(clients, classes_per_client)
    holders_each = int(np.ceil(clients / len(classes) * classes_per_client))
    smallest = int(min(10 / (1 - TRAIN_SHARE), len(labels) / clients / 2)) / len(classes)
    pieces: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label, size in zip(classes, sizes, strict=True):
        holders = np.flatnonzero(wanted)[:holders_each]
        share = size / len(holders) if len(holders) else 0
        low = int(max(share / 10, smallest))
        if share < 1 or (not balanced and low >= int(share)):
            raise DataError(
                f"class {label} has {size} samples for {len(holders)} clients, too few for PFLlib's draw; lower "
                "partition.clients or partition.classes_per_client, use more data, or set partition.draw: run"
            )
        others = len(holders) - 1
        counts = np.full(others, int(share)) if balanced else rng.randint(low, int(share), others)
        for client, piece in zip(holders, np.split(np.flatnonzero(labels == label), np.cumsum(counts)), strict=True):
            pieces[client].append(piece)
        wanted[holders] -= 1
    return _split([np.concatenate(own) for own in pieces], rng)


def _split(parts: list[np.ndarray], rng: np.random.RandomState) -> list[Split]:
    """Splits each client's samples into training and test samples, as scikit-learn's `train_test_split` does."""
    splits = []
    for samples in parts:
        num_test = len(samples) - int(TRAIN_SHARE * len(samples))
        order = rng.permutation(len(samples))
        splits.append((np.sort(samples[order[num_test:]]), np.sort(samples[order[:num_test]])))
    return splits
