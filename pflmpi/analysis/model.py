"""The model that a client predicts with, put together from a checkpoint as the checkpoint says.

A *flat* model has its arrays by path, "body/...", "head/..." and "stats/...".
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pflmpi.analysis.checkpoint import Checkpoint
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.learning.personal import ModelExpression, NotAModel, assemble, messages
from pflmpi.store import run_folder
from pflmpi.text import short_name

Flat = dict[str, np.ndarray]

_RECEIVED = "received/"  # in a client's state: its last reply, where it is tested with that


@dataclass(frozen=True)
class ClientState:
    """What a client keeps, and what it received last, by path.

    Attributes:
        kept: also its last reply, below "received/", where the client keeps that.
        received: messages that it predicts with; the first name of a path is the message's.
    """

    client: int
    kept: Flat
    received: Flat


def client_states(checkpoint: Checkpoint, clients: Sequence[int]) -> list[ClientState]:
    """State of some clients, each of which exists.

    Raises:
        CheckpointError: a file is damaged (everything that is read is checked).
    """
    kept: dict[int, Flat] = {client: {} for client in clients}
    for ids, leaves in run_folder.read_clients(checkpoint.run, checkpoint.number, np.array(clients)).values():
        for path, rows in leaves.items():
            for client, row in zip(ids.tolist(), rows, strict=True):
                kept[client][path] = np.asarray(row)
    newest = run_folder.read_received(checkpoint.run, checkpoint.number, np.array(clients))
    return [
        ClientState(
            client,
            state,
            {path: rows[place] for path, rows in newest.items()}
            | {path.removeprefix(_RECEIVED): state[path] for path in state if path.startswith(_RECEIVED)},
        )
        for place, (client, state) in enumerate(kept.items())
    ]


def personal_model(checkpoint: Checkpoint, state: ClientState) -> Flat:
    """The flat model that a client predicts with.

    Raises:
        CheckpointError: the checkpoint does not say how it is put together; see `Checkpoint.personal`.
        ConfigError: the client does not predict with one model; says with what.
    """
    personal = checkpoint.personal
    if isinstance(personal, NotAModel):
        name = short_name(str(checkpoint.attributes["algorithm_class"]))
        raise ConfigError(f"a client of {name} predicts with {personal.why}, which is not one model; choose a part")
    return assembled(checkpoint, personal, state)


def comparable_model(checkpoint: Checkpoint) -> ModelExpression:
    """Description of the model by which clients are compared: what they predict with, or what that is built on."""
    personal = checkpoint.personal
    return personal.nearest if isinstance(personal, NotAModel) else personal


def assembled(checkpoint: Checkpoint, model: ModelExpression, state: ClientState) -> Flat:
    """A flat model, put together as described.

    Raises:
        CheckpointError: the checkpoint lacks something that belongs to the model.
    """
    if missing := messages(model) - {path.partition("/")[0] for path in state.received}:
        raise CheckpointError(f"{checkpoint.path} lacks what client {state.client} received: {', '.join(missing)}")
    # PyTorch makes a boolean times a number float32, as here; NumPy would make it float64.
    kept = {path: array.astype(np.float32) if array.dtype == bool else array for path, array in state.kept.items()}
    try:
        return dict(_leaves(assemble(model, _nested(kept), _nested(state.received))))
    except KeyError as error:
        raise CheckpointError(
            f"{checkpoint.path} describes models with {error}, which client {state.client} does not keep"
        ) from error


def _nested(flat: Mapping[str, np.ndarray]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, array in flat.items():
        *parents, name = path.split("/")
        group = nested
        for parent in parents:
            group = group.setdefault(parent, {})
        group[name] = array
    return nested


def _leaves(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    for name, value in nested.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}/")
        else:
            yield prefix + name, np.asarray(value)
