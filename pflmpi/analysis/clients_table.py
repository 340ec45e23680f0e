"""The values of each client after a round: metrics, traffic and diagnostics."""

import re
from collections.abc import Iterator

import numpy as np

from pflmpi.analysis.checkpoint import Checkpoint
from pflmpi.learning.diagnostics import Category, Diagnostic, PerClient
from pflmpi.store.descriptions import Descriptions

Columns = dict[str, np.ndarray]
ClientValues = tuple[np.ndarray, np.ndarray]  # ascending ids [m] of clients, and their values [m, ...]

_BYTES = {"up": "up_bytes", "down": "down_bytes"}
_PREFIX = re.compile("^(unseen_|trained_|validation_|)client_")  # of metrics; a measure may have it in its name
_CLIENT_AXES = (("client",), ("participant",))  # axes of metrics with one number for each client or participant


def build_client_columns(checkpoint: Checkpoint) -> Columns:
    """The columns [N] of `Run.clients_table` for one round, in client order; NaN where a client has no value.

    Raises:
        CheckpointError: a file is damaged.
    """
    clients = np.arange(checkpoint.num_clients)
    participants = checkpoint.participants
    columns: Columns = {
        "round": np.full(len(clients), checkpoint.number),
        "client": clients,
        **({"client_name": np.array(names, object)} if (names := checkpoint.client_names) else {}),
        "participant": np.isin(clients, [] if participants is None else participants),
        "train_samples": checkpoint.partition["train_samples"],
        "test_samples": checkpoint.partition["test_samples"],
    }
    if "validation_samples" in checkpoint.partition:
        columns["validation_samples"] = checkpoint.partition["validation_samples"]
    unknown = np.full(len(clients), np.nan)  # round 0 has no traffic
    columns |= {column: checkpoint.bytes.get(name, unknown) for name, column in _BYTES.items()}
    columns |= dict(_client_metrics(checkpoint))
    if "seconds_round" in checkpoint.metrics:
        columns["round_seconds"] = np.full(len(clients), float(checkpoint.metrics["seconds_round"]))
    for name, diagnostic in checkpoint.diagnostics.items():
        if isinstance(diagnostic, PerClient | Category):
            columns[f"diagnostic_{name}"] = read_client_numbers(checkpoint, name, diagnostic)
    return columns


def _client_metrics(checkpoint: Checkpoint) -> Iterator[tuple[str, np.ndarray]]:
    """The metrics that have a number for each client or participant."""
    descriptions = Descriptions({})
    for name, values in checkpoint.metrics.items():
        axes = descriptions.figure("metrics", name)[1]
        if axes not in _CLIENT_AXES or name in {"participants", "total", "validation_total"}:  # columns of their own
            continue
        column = _PREFIX.sub(r"\1", name)
        if axes == ("client",):
            yield column, values
        else:
            client_values = np.full(checkpoint.num_clients, np.nan)
            client_values[checkpoint.metrics["participants"]] = values
            yield column, client_values


# --- values of a diagnostic, from the state of clients, from the server's, or measured in the round


def read_diagnostic(
    checkpoint: Checkpoint, name: str, diagnostic: Diagnostic, among: np.ndarray | None = None
) -> ClientValues | None:
    """A diagnostic's values by client, flattened to [m, n]; None if the checkpoint has none.

    Args:
        among: ids of the clients to read; None for all.
    """
    if diagnostic.kept:
        return read_kept_rows(checkpoint, diagnostic.kept, among)
    if diagnostic.server:
        values = checkpoint.server_leaf(diagnostic.server)
        clients = None if values is None else np.arange(len(values))
    else:
        clients, values = checkpoint.participants, checkpoint.measured.get(name)
    if clients is None or values is None:
        return None
    rows = _row_index(clients, among)
    return clients[rows], values[rows].reshape(len(clients[rows]), -1)


def _row_index(clients: np.ndarray, among: np.ndarray | None) -> np.ndarray | slice:
    """Index of the rows of the clients [m] that are in `among`; None for all."""
    return slice(None) if among is None else np.isin(clients, among)


def read_kept_rows(checkpoint: Checkpoint, path: str, among: np.ndarray | None = None) -> ClientValues | None:
    """The clients' state at or below a path, flattened to [m, n]; None if there is none."""
    one_cohort = len(checkpoint.cohorts) == 1
    leaves = dict.fromkeys(leaf if one_cohort else leaf.partition("/")[2] for leaf in checkpoint.clients)
    arrays = [
        read_kept_array(checkpoint, leaf, among) for leaf in leaves if leaf == path or leaf.startswith(f"{path}/")
    ]
    kept = [array for array in arrays if array is not None]
    if not kept:
        return None
    return kept[0][0], np.concatenate([values.reshape(len(clients), -1) for clients, values in kept], axis=1)


def read_kept_array(checkpoint: Checkpoint, path: str, among: np.ndarray | None = None) -> ClientValues | None:
    """One leaf of the clients of all cohorts, [m, ...]; None if no client has it."""
    cohort_values = []
    for cohort, members in checkpoint.cohorts.items():
        leaf = path if len(checkpoint.cohorts) == 1 else f"{cohort}/{path}"
        if leaf in checkpoint.clients:
            rows = _row_index(members, among)
            cohort_values.append((members[rows], checkpoint.clients[leaf][rows]))
    if not cohort_values:
        return None
    clients, values = (np.concatenate(parts) for parts in zip(*cohort_values, strict=True))
    order = np.argsort(clients, kind="stable")
    return clients[order], values[order]


def read_client_numbers(checkpoint: Checkpoint, name: str, diagnostic: PerClient | Category) -> np.ndarray:
    """A diagnostic's number [N] for each client, NaN where a client has none."""
    values = np.full(checkpoint.num_clients, np.nan)
    client_values = read_diagnostic(checkpoint, name, diagnostic)
    if client_values is None:
        return values
    clients, numbers = client_values
    values[clients] = numbers[:, 0]
    if isinstance(diagnostic, PerClient) and diagnostic.known:
        flags = read_kept_rows(checkpoint, diagnostic.known)
        values[slice(None) if flags is None else flags[0][~flags[1][:, 0]]] = np.nan
    if isinstance(diagnostic, Category):
        values[values < 0] = np.nan
    return values
