"""Descriptions of an algorithm's diagnostics: numbers, categories, shares and weights of clients in a round.

Checkpoints store the descriptions, so that any reader draws them by kind without knowing the algorithm. The values are
arrays of the clients' state (`kept`), of the server's state (`server`), or those that `Algorithm.diagnose` returns.
Nothing here needs torch.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

DIAGNOSTIC_NAME = re.compile("[a-z][a-z0-9_]*")  # of a diagnostic, which becomes part of file names


@dataclass(frozen=True, kw_only=True)
class Diagnostic:
    """Fields of every kind of diagnostic.

    Attributes:
        title: a few words.
        caption: one or two sentences that describe the figure.
        unit: of the values; "" for none.
        kept: path of the values in a client's state; "" if they are not there.
        server: path of the values in the server's state; "" if they are not there. With neither, `diagnose` returns
            them for the participants of the round, in ascending order of their ids.
    """

    title: str
    caption: str = ""
    unit: str = ""
    kept: str = ""
    server: str = ""


@dataclass(frozen=True, kw_only=True)
class PerClient(Diagnostic):
    """A number for each client."""

    known: str = ""  # path of a boolean in a client's state, false while the number has no meaning; "" if it always has
    limits: tuple[float, float] | None = None  # the range of the values, if they have one


@dataclass(frozen=True, kw_only=True)
class Category(Diagnostic):
    """The group of each client, from 0 to `count` - 1; negative for none."""

    count: int


@dataclass(frozen=True, kw_only=True)
class EntryShare(Diagnostic):
    """Boolean masks of chosen entries, of one shape for all clients; drawn as shares and overlaps.

    The path may name several arrays, such as a head's weight and bias; their entries are counted together.
    """


@dataclass(frozen=True, kw_only=True)
class ClientWeights(Diagnostic):
    """Weights of clients (columns) for clients (rows): [N, N] from the server, [P, P] from `diagnose`.

    Attributes:
        clients: with `kept`, the path of the ids [M] of the clients that have the weights, negative for nobody. The
            weights are [M], or [1 + M] with the client's own first; only those of a round's participants are drawn.
        limits: the range of the values, if they have one. If not, the diagonal is not drawn, as a client's own weight
            may be far above all others.
    """

    clients: str = ""
    limits: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class ClassVectors(Diagnostic):
    """One vector per class, [K, d], of the server, of each client, or of both; drawn on a plane.

    Attributes:
        kept_known: path of booleans [K] in a client's state, false for classes without a vector; "" if all have one.
        server_known: the same in the server's state.
    """

    kept_known: str = ""
    server_known: str = ""


KINDS = {kind.__name__: kind for kind in (PerClient, Category, EntryShare, ClientWeights, ClassVectors)}


def to_json(diagnostics: Mapping[str, Diagnostic]) -> dict[str, dict[str, Any]]:
    """Plain values for JSON, by name.

    >>> to_json({"alpha": PerClient(title="Alpha", kept="alpha")})["alpha"]["kind"]
    'PerClient'
    """
    return {name: {"kind": type(diagnostic).__name__, **asdict(diagnostic)} for name, diagnostic in diagnostics.items()}


def from_json(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Diagnostic]:
    """The descriptions from the values of `to_json`, by name; kinds of a newer version are left out."""
    return {
        name: KINDS[description["kind"]](**{key: _plain(value) for key, value in description.items() if key != "kind"})
        for name, description in values.items()
        if description["kind"] in KINDS
    }


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
