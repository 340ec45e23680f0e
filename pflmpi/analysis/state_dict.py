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
    (state,) = kept(run, round, np.array([client]))
    if leaf is not None:
        return names(_part(state.client, leaf, f"client {client} keeps"))
    try:
        return names(personal_model(state))
    except ConfigError as error:
        others = f"of it with --leaf: {_parts(state.client)}; or of the server's with --server"
        raise ConfigError(f"{error} {others}") from error


def kept(run: Run, round: Round, clients: np.ndarray) -> list[Kept]:
    """Return what a checkpoint holds for some clients [m], each of which exists.

    Raises:
        CheckpointError: a file is damaged (what is returned was checked whole).
    """
    states: dict[int, Flat] = {int(client): {} for client in clients}
    for ids, leaves in run_folder.read_clients(round.run, round.number, clients).values():
        for path, rows in leaves.items():
            for client, row in zip(ids.tolist(), rows, strict=True):
                states[client][path] = row
    return [Kept(run.config["algorithm"], client, state, round.server) for client, state in states.items()]


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
