"""Holds clients out of training, to test them as newcomers."""

import hashlib
from dataclasses import dataclass
from itertools import chain

import numpy as np

from pflmpi.data.dataset import Dataset, standardise
from pflmpi.data.federation import Federation, select_clients
from pflmpi.errors import DataError


@dataclass(frozen=True, eq=False)
class Division:
    """The clients of a partition: N that are trained, and U unseen ones after them."""

    trained: Federation  # the first N
    everyone: Federation  # all N + U; the unseen ones have the ids N to N + U - 1
    numbers: np.ndarray  # [N + U] the number of each client in the partition, ascending in both parts

    @property
    def digest(self) -> str:
        """SHA-256 (hex) over the samples of each client, and which clients are trained."""
        if not self.unseen_numbers:
            return self.trained.digest
        return hashlib.sha256(f"{self.everyone.digest}\ntrained {self.trained.num_clients}\n".encode()).hexdigest()

    @property
    def unseen_numbers(self) -> list[int]:
        """The unseen clients by their numbers in the partition, ascending."""
        return [int(number) for number in self.numbers[self.trained.num_clients :]]


def hold_out_clients(federation: Federation, share: float, rng: np.random.Generator) -> Division:
    """Holds a share of the clients out of training, at least one unless the share is 0.

    Raises:
        DataError: no client would be left to train, or the trained or the unseen clients have no test samples.
    """
    n = federation.num_clients
    count = max(1, int(np.floor(share * n + 0.5))) if share else 0
    if count >= n:
        raise DataError(
            f"evaluation.unseen = {share} keeps {count} of {n} clients out of training, and nobody is left to train; "
            "lower it, or have more clients"
        )
    if not count:
        return Division(federation, federation, np.arange(n))
    is_unseen = np.zeros(n, bool)
    is_unseen[rng.permutation(n)[:count]] = True
    trained, unseen = np.flatnonzero(~is_unseen), np.flatnonzero(is_unseen)
    for clients, which in ((trained, "trained"), (unseen, "unseen")):
        if not federation.num_test[clients].any():
            raise DataError(
                f"evaluation.unseen = {share}: none of the {len(clients)} {which} clients has a test sample; "
                "change it, or give each client two samples or more"
            )
    if federation.validation and not federation.num_validation[trained].any():
        raise DataError(f"evaluation.unseen = {share}: none of the trained clients has a validation sample; change it")
    numbers = np.concatenate([trained, unseen])
    return Division(select_clients(federation, trained), select_clients(federation, numbers), numbers)


def standardise_on_trained(division: Division) -> Dataset:
    """Returns the dataset, standardised by the samples of the trained clients alone."""
    federation = division.trained
    if not division.unseen_numbers:
        return federation.dataset
    return standardise(federation.dataset, np.unique(np.concatenate([*chain(*federation.samples)])))
