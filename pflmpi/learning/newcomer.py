"""How a client that has never taken part joins, or why it cannot."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Newcomer:
    """How a client that has never taken part joins; it predicts as the others do.

    Attributes:
        trains: whether it makes local updates; otherwise it predicts with what it receives.
    """

    trains: bool


@dataclass(frozen=True)
class CannotJoin:
    """A client that has never taken part cannot predict.

    Attributes:
        why: for the user.
    """

    why: str
