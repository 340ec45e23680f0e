"""Plain state dicts from a checkpoint: arrays by the names that a module outside the runtime has for them."""

import numpy as np

from pflmpi.analysis.personal import Flat, Kept, below, personal_model
from pflmpi.analysis.run import Round, Run
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.module_names import module_names
from pflmpi.store import run_folder


def client_state(run: Run, round: Round, client: int, leaf: str | None = None) -> Flat:
    """Return what a client predicts with, or a part of what it keeps, by module names.

    Args:
        leaf: the path of a sub-tree of what it keeps, or of one array; "." for everything; None for its model.

    Raises:
        CheckpointError: there is no such client, or a file is damaged (what is returned was checked whole).
        ConfigError: it keeps no such part, or does not predict with a model alone.
    """
    number = sum(len(ids) for ids in round.cohorts.values())
    if not 0 <= client < number:
        raise CheckpointError(f"{run.path} has the clients 0 to {number - 1}, asked for is client {client}")
    rows = run_folder.read_clients(round.run, round.number, np.array([client]))
    state = {path: array[0] for _, leaves in rows.values() for path, array in leaves.items()}
    if leaf is not None:
        return names(_part(state, leaf, f"client {client} keeps"))
    try:
        model = personal_model(Kept(run.config["algorithm"], client, state, round.server))
    except ConfigError as error:
        raise ConfigError(f"{error} of it with --leaf: {_parts(state)}; or of the server's with --server") from error
    return names(model)


def server_state(round: Round, leaf: str | None = None) -> Flat:
    """Return what the server keeps, or a part of it, by module names; see `client_state`."""
    return names(_part(dict(round.server), leaf or ".", "the server keeps"))


def names(flat: Flat) -> Flat:
    """Return arrays by the names that they have in a module; see `module_names`."""
    called = module_names(flat)
    return {called[path]: array for path, array in flat.items()}


def _part(state: Flat, leaf: str, who: str) -> Flat:
    found = below(state, leaf.replace(".", "/") if leaf != "." and leaf not in state else leaf)
    if not found:
        raise ConfigError(f"{who} nothing at --leaf {leaf}; known: {_parts(state)}")
    return found


def _parts(state: Flat) -> str:
    """Return the first names of the paths, for an error."""
    return ", ".join(sorted({path.partition("/")[0] for path in state})) or "nothing"
