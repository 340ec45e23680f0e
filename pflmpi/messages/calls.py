"""The collective calls that move messages."""

from dataclasses import dataclass
from typing import Literal

Operation = Literal["broadcast", "scatter", "gather", "maximum", "sum", "all-to-all"]


@dataclass(frozen=True)
class Call:
    """One collective call of a transport.

    Attributes:
        operation: its name.
        sizes: [R] bytes of each rank's buffer or part; of an all-to-all, what it sends to all others.
        received: [R] bytes that each rank receives in an all-to-all.
        answers: whether an all-to-all is on the way to clients, not from them.
    """

    operation: Operation
    sizes: tuple[int, ...]
    received: tuple[int, ...] = ()
    answers: bool = False
