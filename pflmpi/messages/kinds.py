"""What may travel between the server and the clients: the kinds of messages, their size, and the exact sum.

An algorithm declares its messages with these kinds; the runtime sends exactly that. Every kind knows the
*logical* bytes of one client, which is what papers count: float32 = 4, a label = 4, a count = 4.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from pflmpi import tree
from pflmpi.tree import Tree

Messages = dict[str, Tree]  # by name, as the algorithm declares them

# --- from a client to the server ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Sum:
    """Trees shaped `like`, added over the participants."""

    like: Tree

    def client_bytes(self, classes_held: int) -> int:
        """The logical bytes of one client's message."""
        return tree.num_bytes(self.like)


@dataclass(frozen=True)
class Mean(Sum):
    """Trees shaped `like`, averaged over the participants with weights n_i (`samples`) or 1 (`clients`)."""

    by: Literal["samples", "clients"] = "samples"


@dataclass(frozen=True)
class Rows(Sum):
    """One tree shaped `like` from every participant; the server sees them along a first axis [P, ...]."""


@dataclass(frozen=True)
class ClassMeans:
    """For the classes a client holds: label, mean feature [d] and, with `counts`, the number of samples.

    A client hands over `{"means": [K, d]}` (and `"counts": [K]`); only rows of held classes travel. The server
    gets `{"labels": [M], "means": [M, d], "clients": [M]}` (and `"counts": [M]`), in client and label order.
    """

    num_features: int
    counts: bool = True

    def client_bytes(self, classes_held: int) -> int:
        """The logical bytes of one client's message: |S| (4 d + 4), and 4 |S| more for the counts."""
        return classes_held * 4 * (self.num_features + 1 + self.counts)


# --- from the server to a client ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Shared:
    """One tree shaped `like`, the same for every client."""

    like: Tree

    def client_bytes(self, classes_held: int) -> int:
        """The logical bytes that one client receives."""
        return tree.num_bytes(self.like)


@dataclass(frozen=True)
class Own(Shared):
    """One tree shaped `like` for each client; the server publishes rows [R, ...] for the R receivers."""


@dataclass(frozen=True)
class OwnClasses(Shared):
    """One tree shaped `like` for each class; a client receives the classes it holds.

    The server publishes [K, ...]; a client sees [K, ...] with zeros where it does not hold the class.
    """

    def client_bytes(self, classes_held: int) -> int:
        """The logical bytes that one client receives."""
        return classes_held * tree.num_bytes(self.like)


Uplink = Sum | ClassMeans
Downlink = Shared

# --- the sum that does not depend on order -------------------------------------------------------------------
# Float addition is not associative, so a tree reduction over ranks would change bits with the number of ranks.
# Integers are: every value becomes a multiple of one common power of two, small enough that no sum overflows.

_BITS = 62


def common_shift(largest: np.ndarray, terms: int) -> np.ndarray:
    """The power of two that makes `terms` values of at most `largest` fit an int64 sum.

    Args:
        largest: [M] float64, the largest magnitude per leaf over all participants; not finite is refused before.
        terms: the number of participants, over all ranks.
    """
    _, exponent = np.frexp(largest)
    shift: np.ndarray = _BITS - int(np.ceil(np.log2(max(terms, 2)))) - exponent.astype(np.int64)
    return shift


def to_fixed(values: np.ndarray, shift: int) -> np.ndarray:
    """`values` (float64, overwritten) as int64 multiples of 2**-shift, rounded to nearest even."""
    values *= 2.0**shift  # exact
    fixed: np.ndarray = np.rint(values, out=values).astype(np.int64)
    return fixed


def from_fixed(values: np.ndarray, shift: int) -> np.ndarray:
    """The float64 values of int64 multiples of 2**-shift."""
    floats: np.ndarray = values.astype(np.float64) * 2.0**-shift
    return floats


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A template leaf for a declaration: a shape and dtype without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def with_rows(like: Tree, rows: int) -> Tree:
    """The template of `rows` trees shaped `like`, along a new first axis."""
    return tree.map(lambda leaf: tensor(rows, *leaf.shape, dtype=leaf.dtype), like)


# --- the collective calls that move them ---------------------------------------------------------------------

Operation = Literal["broadcast", "scatter", "gather", "maximum", "sum"]


@dataclass(frozen=True)
class Call:
    """One collective call of a transport.

    Attributes:
        operation: its name.
        sizes: [R] bytes of each rank's buffer or part.
    """

    operation: Operation
    sizes: tuple[int, ...]
