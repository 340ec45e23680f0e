"""The model that a client predicts with, put together from a checkpoint as each algorithm does it.

A *flat* model is what a tree is elsewhere: arrays by path, "body/...", "head/..." and "stats/...".
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pflmpi.errors import ConfigError

Flat = dict[str, np.ndarray]

_PARTS = ("body", "head", "stats")


@dataclass(frozen=True)
class Kept:
    """What a checkpoint holds that a client predicts with.

    Attributes:
        options: the `algorithm` section of the run's configuration.
        number: of the client.
        client: what it keeps, by path.
        server: what the server keeps, by path.
    """

    options: Mapping[str, Any]
    number: int
    client: Flat
    server: Mapping[str, np.ndarray]

    def received(self, message: str, at: str) -> Flat:
        """Return a message of the server: the last that the client received, or else what stands at a server's path."""
        return below(self.client, f"received/{message}") or below(self.server, at)

    def parts(self) -> Flat:
        """Return the parts of a model that the client keeps at the top of its state."""
        return {path: array for path, array in self.client.items() if path.split("/")[0] in _PARTS}


def below(state: Mapping[str, np.ndarray], prefix: str) -> Flat:
    """Return the arrays below a path by the rest of theirs; all of them for "." and one array by its last name.

    >>> below({"model/head/bias": np.zeros(2)}, "model")
    {'head/bias': array([0., 0.])}
    """
    if prefix == ".":
        return dict(state)
    if prefix in state:
        return {prefix.rpartition("/")[2]: state[prefix]}
    return {path[len(prefix) + 1 :]: array for path, array in state.items() if path.startswith(prefix + "/")}


def personal_model(kept: Kept) -> Flat:
    """Return the flat model that a client predicts with.

    Raises:
        ConfigError: it predicts with more than one model's weights, or with its data; says with what.
    """
    name = str(kept.options.get("name"))
    if name not in _RULES:
        raise ConfigError(f"what a client of {name!r} predicts with is not known here; choose a part of its state")
    found = _RULES[name](kept)
    if isinstance(found, str):
        raise ConfigError(f"a client of {name} predicts with {found}, which is not one model; choose a part")
    assert found, f"{name}: client {kept.number} has no model"
    return found


def layered_model(kept: Kept) -> Flat:
    """Return the body, head and statistics of a client: `personal_model`, or what is nearest to it.

    Where a client predicts with more than a model, that is the model which its prediction is built on: with its own
    head where there are two, before a step on its data, with the beta of its last round, without relations, valves
    and class means.
    """
    name = str(kept.options.get("name"))
    found = _RULES[name](kept)
    if isinstance(found, str):
        found = _LAYERED[name](kept)
    return {path: array for path, array in found.items() if path.split("/")[0] in _PARTS}


def _at(prefix: str) -> Callable[[Kept], Flat]:
    return lambda kept: below(kept.client, prefix)


def _shared(message: str, at: str) -> Callable[[Kept], Flat]:
    """The server's message, and over it what the client keeps of the model itself."""
    return lambda kept: {**kept.received(message, at), **kept.parts()}


def _with_head(kept: Kept) -> Flat:
    return {**kept.parts(), **_prefixed("head", kept.received("head", "head"))}


def _apfl(kept: Kept) -> Flat:
    shared, alpha = _shared("model", "model")(kept), kept.client["alpha"]
    return {path: alpha * own + (1 - alpha) * shared[path] for path, own in below(kept.client, "own").items()}


def _fedfcd(kept: Kept) -> Flat:
    model = below(kept.client, "model")
    return model if kept.options["variant"] == "without_fusion" else _added(model, kept.received("head", "head"))


def _fedproto(kept: Kept) -> Flat | str:
    if kept.options["predict_with"] == "head":
        return below(kept.client, "model")
    return "the nearest class mean (algorithm.predict_with = 'prototypes')"


def _fedrod(kept: Kept) -> Flat:
    model = _shared("model", "model")(kept)
    return model if kept.options["predict_with"] == "generic" else _added(model, below(kept.client, "personal"))


def _fesem(kept: Kept) -> Flat:
    mine = below(kept.client, "received/centre")
    if not mine:
        members = kept.server["cluster"]
        counts = np.array([(members == number).sum() for number in range(int(kept.options["num_clusters"]))])
        share = counts / counts.sum() if counts.any() else np.full(len(counts), 1 / len(counts))
        number = int(members[kept.number])  # -1: in none yet, which is the mean over the clusters' members
        mine = {
            path: rows[number] if number >= 0 else np.tensordot(share, rows, 1).astype(rows.dtype)
            for path, rows in below(kept.server, "centres").items()
        }
    return {**mine, **kept.parts()}


def _pfedafe(kept: Kept) -> Flat | str:
    if kept.options["adaptive"]:
        return "a mix of its own and the shared body whose proportion it learns anew on its data"
    return _mixed(kept, np.float32(kept.options["beta_init"] if kept.client["trained"] else 0))


def _mixed(kept: Kept, beta: np.ndarray | np.float32) -> Flat:
    own, shared = kept.parts(), kept.received("body", "shared")
    return {**own, **{path: (1 - beta) * theirs + beta * own[path] for path, theirs in shared.items()}}


def _pfedpm(kept: Kept) -> Flat | str:
    return "a relation module on class means" if kept.options["relation"] else below(kept.client, "model")


def _added(model: Flat, head: Flat) -> Flat:
    """Return a model whose head gives the sum of two heads' scores."""
    return {**model, **{f"head/{name}": model[f"head/{name}"] + array for name, array in head.items()}}


def _prefixed(prefix: str, flat: Flat) -> Flat:
    return {f"{prefix}/{path}": array for path, array in flat.items()}


_RULES: dict[str, Callable[[Kept], Flat | str]] = {
    "apfl": _apfl,
    "ditto": _at("personal"),
    "fedamp": _at("model"),
    "fedavg": _shared("model", "model"),
    "fedcp": lambda kept: "two heads and a gate between them",
    "fedfcd": _fedfcd,
    "fedfomo": _at("model"),
    "fedgh": _with_head,
    "fedgmh": _at("model"),
    "fedper": _shared("body", "shared"),
    "fedprox": _shared("model", "model"),
    "fedproto": _fedproto,
    "fedrep": _shared("body", "shared"),
    "fedrod": _fedrod,
    "fesem": _fesem,
    "gpfl": lambda kept: "a valve on class embeddings between body and head",
    "l2gd": _at("model"),
    "lgfedavg": _with_head,
    "local": _at("model"),
    "perfedavg": lambda kept: "the shared model after a step on its own data",
    "pfedafe": _pfedafe,
    "pfedcfr": _at("model"),
    "pfedme": _at("personal"),
    "pfedpm": _pfedpm,
}

_LAYERED: dict[str, Callable[[Kept], Flat]] = {
    "fedcp": _shared("model", "model"),
    "fedproto": _at("model"),
    "gpfl": _shared("shared", "shared"),
    "perfedavg": _shared("model", "model"),
    "pfedafe": lambda kept: _mixed(kept, kept.client["beta"]),
    "pfedpm": _at("model"),
}
