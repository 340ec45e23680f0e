"""The figures of each client after each round, one array for each column."""

from collections.abc import Iterator

import numpy as np

from pflmpi.analysis.checkpoint import Checkpoint
from pflmpi.learning.diagnostics import Category, Diagnostic, PerClient
from pflmpi.store.descriptions import Descriptions

Columns = dict[str, np.ndarray]
ClientValues = tuple[np.ndarray, np.ndarray]  # the ascending ids [m] of clients, and the values of each, [m, ...]

_BYTES = {"up": "up_bytes", "down": "down_bytes"}
_OF_CLIENTS = (("client",), ("participant",))  # axes of figures that have a number for each


def build_client_columns(checkpoint: Checkpoint) -> Columns:
    """Columns [N] by name, in client order; NaN where a client has no value.

    Raises:
        CheckpointError: a file is damaged.
    """
    clients = np.arange(checkpoint.num_clients)
    participants = checkpoint.participants
    columns: Columns = {
        "round": np.full(len(clients), checkpoint.number),
        "client": clients,
        "participant": np.isin(clients, [] if participants is None else participants),
        "train_samples": checkpoint.partition["train_samples"],
        "test_samples": checkpoint.partition["test_samples"],
    }
    if "validation_samples" in checkpoint.partition:
        columns["validation_samples"] = checkpoint.partition["validation_samples"]
    columns |= {column: checkpoint.bytes[name] for name, column in _BYTES.items() if name in checkpoint.bytes}
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
        if axes not in _OF_CLIENTS or name in {"participants", "total", "validation_total"}:  # which `partition` has
            continue
        column = name.replace("client_", "")
        if axes == ("client",):
            yield column, values
        else:
            of_all = np.full(checkpoint.num_clients, np.nan)
            of_all[checkpoint.metrics["participants"]] = values
            yield column, of_all


# --- values of a diagnostic: what clients keep, what the server keeps, or what was measured


def read_diagnostic(
    checkpoint: Checkpoint, name: str, diagnostic: Diagnostic, among: np.ndarray | None = None
) -> ClientValues | None:
    """A diagnostic's values by client, flattened to [m, n]; None where the checkpoint has none.

    Args:
        among: ids of the clients that are read; None for all.
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
    """An index of the rows of clients [m] that are `among` others."""
    return slice(None) if among is None else np.isin(clients, among)


def read_kept_rows(checkpoint: Checkpoint, path: str, among: np.ndarray | None = None) -> ClientValues | None:
    """What clients keep at or below a path, flattened to [m, n]; None where no client does."""
    alike = len(checkpoint.cohorts) == 1
    leaves = dict.fromkeys(leaf if alike else leaf.partition("/")[2] for leaf in checkpoint.clients)
    arrays = [
        read_kept_array(checkpoint, leaf, among) for leaf in leaves if leaf == path or leaf.startswith(f"{path}/")
    ]
    kept = [array for array in arrays if array is not None]
    if not kept:
        return None
    return kept[0][0], np.concatenate([values.reshape(len(clients), -1) for clients, values in kept], axis=1)


def read_kept_array(checkpoint: Checkpoint, path: str, among: np.ndarray | None = None) -> ClientValues | None:
    """One array of the clients of all cohorts, [m, ...]; None where no client keeps it."""
    alike = len(checkpoint.cohorts) == 1
    of_cohorts = [
        (clients[rows := _row_index(clients, among)], checkpoint.clients[leaf][rows])
        for cohort, clients in checkpoint.cohorts.items()
        if (leaf := path if alike else f"{cohort}/{path}") in checkpoint.clients
    ]
    if not of_cohorts:
        return None
    clients, values = (np.concatenate(parts) for parts in zip(*of_cohorts, strict=True))
    order = np.argsort(clients, kind="stable")
    return clients[order], values[order]


def read_client_numbers(checkpoint: Checkpoint, name: str, diagnostic: PerClient | Category) -> np.ndarray:
    """The number [N] of each client, NaN where it has none."""
    values = np.full(checkpoint.num_clients, np.nan)
    if (of_round := read_diagnostic(checkpoint, name, diagnostic)) is None:
        return values
    clients, numbers = of_round
    values[clients] = numbers[:, 0]
    if isinstance(diagnostic, PerClient) and diagnostic.known:
        flags = read_kept_rows(checkpoint, diagnostic.known)
        values[slice(None) if flags is None else flags[0][~flags[1][:, 0]]] = np.nan
    if isinstance(diagnostic, Category):
        values[values < 0] = np.nan
    return values
