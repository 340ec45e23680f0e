"""Assembles the model that a client predicts with from a checkpoint, and names its arrays as in a state dict.

A *flat* model has its arrays by path: "body/...", "head/..." and "stats/...".
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pflmpi import outside
from pflmpi.analysis.checkpoint import Checkpoint
from pflmpi.config import yaml_file
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.learning.personal import ModelExpression, NotAModel, assemble, messages
from pflmpi.module_names import module_names
from pflmpi.store import module_file, run_folder
from pflmpi.store.module_file import CONSTANT, FROM_FILE, Entries
from pflmpi.text import short_name

Flat = dict[str, np.ndarray]

_RECEIVED = "received/"  # in a client's state: the last reply of the server, if the client is tested with that


@dataclass(frozen=True)
class ClientState:
    """What a client keeps, and the messages that it predicts with, by path."""

    client: int
    kept: Flat  # its state, including its last reply below "received/" if it keeps that
    received: Flat  # messages that it predicts with; paths begin with the name of the message


def read_client_states(checkpoint: Checkpoint, clients: Sequence[int]) -> list[ClientState]:
    """Reads the states of some existing clients.

    Raises:
        CheckpointError: a file is damaged (everything that is read is checked).
    """
    ids = np.array(clients)
    kept = run_folder.split_by_client(run_folder.read_clients(checkpoint.run, checkpoint.number, ids))
    newest = run_folder.read_received(checkpoint.run, checkpoint.number, ids)
    states = []
    for row, client in enumerate(clients):
        state = kept.get(client, {})
        received = {path: rows[row] for path, rows in newest.items()}
        received |= {path.removeprefix(_RECEIVED): state[path] for path in state if path.startswith(_RECEIVED)}
        states.append(ClientState(client, state, received))
    return states


def get_comparable_model(checkpoint: Checkpoint) -> ModelExpression:
    """Describes the model by which clients are compared: what they predict with, or the model it is built on."""
    personal = checkpoint.personal
    return personal.nearest if isinstance(personal, NotAModel) else personal


def assemble_model(checkpoint: Checkpoint, model: ModelExpression, state: ClientState) -> Flat:
    """Assembles a flat model from its description.

    Raises:
        CheckpointError: the checkpoint lacks an array of the model.
    """
    if missing := messages(model) - {path.partition("/")[0] for path in state.received}:
        raise CheckpointError(f"{checkpoint.path} lacks what client {state.client} received: {', '.join(missing)}")
    # PyTorch computes boolean times float as float32; NumPy would return float64.
    kept = {path: array.astype(np.float32) if array.dtype == bool else array for path, array in state.kept.items()}
    try:
        return dict(_flatten(assemble(model, _unflatten(kept), _unflatten(state.received))))
    except KeyError as error:
        raise CheckpointError(
            f"{checkpoint.path} describes models with {error}, which client {state.client} does not keep"
        ) from error


def _unflatten(flat: Mapping[str, np.ndarray]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, array in flat.items():
        *parents, name = path.split("/")
        group = nested
        for parent in parents:
            group = group.setdefault(parent, {})
        group[name] = array
    return nested


def _flatten(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    for name, value in nested.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}/")
        else:
            yield prefix + name, np.asarray(value)


def read_client_state_dict(checkpoint: Checkpoint, client: int, leaf: str | None = None) -> Flat:
    """The model that a client predicts with, or a part of its state, with the names of a state dict.

    Args:
        leaf: path of a sub-tree or of one array of the client's state; "." for the whole state; None for its model.

    Raises:
        CheckpointError: there is no such client, or a file is damaged (everything that is returned was checked).
        ConfigError: its state has no such part, or it does not predict with one model.
    """
    (state,) = read_client_states(checkpoint, [client])
    head = _find_head_name(checkpoint, client)
    if leaf is not None:
        return to_module_names(_select_part(state.kept, leaf, f"client {client} keeps"), head)
    personal = checkpoint.personal
    if isinstance(personal, NotAModel):
        name = short_name(str(checkpoint.attributes["algorithm_class"]))
        raise ConfigError(
            f"a client of {name} predicts with {personal.why}, which is not one model; choose a part of it with "
            f"--leaf: {_list_parts(state.kept)}; or of the server's with --server"
        )
    return _build_state_dict(checkpoint, client, assemble_model(checkpoint, personal, state), head)


def read_server_state_dict(checkpoint: Checkpoint, leaf: str | None = None) -> Flat:
    """The server's state, or a part of it, with the names of a state dict; see `read_client_state_dict`."""
    return to_module_names(_select_part(checkpoint.server, leaf or ".", "the server keeps"))


def to_module_names(flat: Mapping[str, np.ndarray], head: str | None = None) -> Flat:
    """Arrays by the names that they have in a module; see `module_names`."""
    names = module_names(flat, head)
    return {names[path]: array for path, array in flat.items()}


def _build_state_dict(checkpoint: Checkpoint, client: int, flat: Flat, head: str | None) -> Flat:
    """The complete state dict of a user's module; for other models, their arrays by name."""
    entries = module_file.read(checkpoint.run, client % len(_read_model_sections(checkpoint)))
    has_entries = head is not None or _read_model_section(checkpoint, client).get("trainable") is not None
    if entries is None and "modules" in checkpoint.attributes and has_entries:
        path = module_file.path(checkpoint.run)
        raise CheckpointError(f"{path} is missing, which has the names and constants of state dicts; copy it again")
    if entries is None or not {*entries.paths.values()} - {CONSTANT, FROM_FILE} <= flat.keys():
        return to_module_names(flat, head)
    frozen = dict(entries.constants)
    if entries.weights:
        frozen |= _read_weights_file(checkpoint, entries)
    return {name: frozen[name] if name in frozen else flat[path] for name, path in entries.paths.items()}


def _read_weights_file(checkpoint: Checkpoint, entries: Entries) -> Flat:
    """Reads the frozen arrays of a model from its weights file.

    Raises:
        CheckpointError: the file is missing, or not the one that the run was made with.
    """
    path, sha256 = entries.weights or ("", "")
    now = module_file.sha256(path)
    if now != sha256:
        problem = f"has changed (SHA-256 {sha256[:12]} then, {now[:12]} now)" if now else "is missing"
        raise CheckpointError(
            f"{path}, which has the frozen weights of {checkpoint.run}, {problem}; put the same file back"
        )
    from pflmpi.models.built_module import read_state_dict  # needs torch

    state = read_state_dict(Path(path))
    return {name: state[name].float().numpy() for name, source in entries.paths.items() if source == FROM_FILE}


def _find_head_name(checkpoint: Checkpoint, client: int) -> str | None:
    """The name of the head in a client's module, if its configuration names one."""
    model = _read_model_section(checkpoint, client)
    return model.get("head") if outside.is_reference(str(model.get("name"))) else None


def _read_model_section(checkpoint: Checkpoint, client: int) -> dict[str, Any]:
    models = _read_model_sections(checkpoint)
    return models[client % len(models)]


def _read_model_sections(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    models = yaml_file.parse_stored(str(checkpoint.attributes["config"]), "the configuration").get("model")
    sections = models if isinstance(models, list) else [models]
    return [section if isinstance(section, dict) else {} for section in sections] or [{}]


def _select_part(state: Mapping[str, np.ndarray], leaf: str, owner: str) -> Flat:
    """All arrays for ".", a sub-tree by the paths below it, or one array by its last name."""
    path = leaf if leaf == "." or leaf in state else leaf.replace(".", "/")
    if path in state:
        return {path.rpartition("/")[2]: state[path]}
    below = "" if path == "." else f"{path}/"
    part = {name.removeprefix(below): array for name, array in state.items() if name.startswith(below)}
    if not part:
        raise ConfigError(f"{owner} nothing at --leaf {leaf}; known: {_list_parts(state)}")
    return part


def _list_parts(state: Mapping[str, np.ndarray]) -> str:
    return ", ".join(sorted({path.partition("/")[0] for path in state})) or "nothing"
