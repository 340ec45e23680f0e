"""Plain state dicts from a checkpoint: arrays by the names that a module outside the runtime has for them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from pflmpi import outside
from pflmpi.analysis.checkpoint import Checkpoint
from pflmpi.analysis.model import Flat, client_states, personal_model
from pflmpi.config import yaml_file
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.module_names import module_names
from pflmpi.store import module_file


def client_state(checkpoint: Checkpoint, client: int, leaf: str | None = None) -> Flat:
    """The model that a client predicts with, or a part of what it keeps, by module names.

    Args:
        leaf: path of a sub-tree of what it keeps, or of one array; "." for everything; None for its model.

    Raises:
        CheckpointError: there is no such client, a file is damaged (what is returned was checked whole), or the file is
            too old to say how models are put together.
        ConfigError: it keeps no such part, or does not predict with a model alone.
    """
    number = checkpoint.num_clients
    if not 0 <= client < number:
        raise CheckpointError(f"{checkpoint.run} has clients 0 to {number - 1}; client {client} was requested")
    (state,) = client_states(checkpoint, [client])
    head = _head(checkpoint, client)
    if leaf is not None:
        return names(_part(state.kept, leaf, f"client {client} keeps"), head)
    try:
        return _as_in_module(checkpoint, client, personal_model(checkpoint, state), head)
    except ConfigError as error:
        others = f"of it with --leaf: {_parts(state.kept)}; or of the server's with --server"
        raise ConfigError(f"{error} {others}") from error


def server_state(checkpoint: Checkpoint, leaf: str | None = None) -> Flat:
    """What the server keeps, or a part of it, by module names; see `client_state`."""
    return names(_part(checkpoint.server, leaf or ".", "the server keeps"))


def names(flat: Mapping[str, np.ndarray], head: str | None = None) -> Flat:
    """Arrays by the names that they have in a module; see `module_names`."""
    called = module_names(flat, head)
    return {called[path]: array for path, array in flat.items()}


def _as_in_module(checkpoint: Checkpoint, client: int, flat: Flat, head: str | None) -> Flat:
    """The whole state dict of a client's module from outside; other models by the names of their arrays."""
    entries = module_file.read(checkpoint.run, client % len(_models(checkpoint)))
    if entries is None and "modules" in checkpoint.attributes and head is not None:
        lost = module_file.path(checkpoint.run)
        raise CheckpointError(f"{lost} is missing, which has the names and constants of state dicts; copy it again")
    if entries is None or not {path for path in entries[0].values() if path} <= flat.keys():
        return names(flat, head)
    paths, constants = entries
    return {name: flat[path] if path else constants[name] for name, path in paths.items()}


def _head(checkpoint: Checkpoint, client: int) -> str | None:
    """The name of the head in a client's model where its configuration says one."""
    models = _models(checkpoint)
    model = models[client % len(models)]
    return model.get("head") if outside.is_reference(str(model.get("name"))) else None


def _models(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    models = yaml_file.parse(str(checkpoint.attributes["config"]), "the configuration")["model"]
    return models if isinstance(models, list) else [models]


def _part(state: Mapping[str, np.ndarray], leaf: str, who: str) -> Flat:
    """All arrays for ".", those below a path by the rest of theirs, one array by its last name."""
    path = leaf if leaf == "." or leaf in state else leaf.replace(".", "/")
    if path in state:
        return {path.rpartition("/")[2]: state[path]}
    below = "" if path == "." else f"{path}/"
    found = {name.removeprefix(below): array for name, array in state.items() if name.startswith(below)}
    if not found:
        raise ConfigError(f"{who} nothing at --leaf {leaf}; known: {_parts(state)}")
    return found


def _parts(state: Mapping[str, np.ndarray]) -> str:
    """The first names of the paths, for an error."""
    return ", ".join(sorted({path.partition("/")[0] for path in state})) or "nothing"
