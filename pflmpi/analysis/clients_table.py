"""The figures of each client after each round, one array for each column."""

from collections.abc import Iterator

import numpy as np

from pflmpi.analysis.checkpoint import Checkpoint
from pflmpi.analysis.series.diagnostics import numbers_of_clients
from pflmpi.learning.diagnostics import Category, PerClient
from pflmpi.store.descriptions import Descriptions

Columns = dict[str, np.ndarray]

_BYTES = {"up": "up_bytes", "down": "down_bytes"}
_OF_CLIENTS = (("client",), ("participant",))  # axes of figures that have a number for each


def of_round(checkpoint: Checkpoint) -> Columns:
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
    columns |= {column: checkpoint.bytes[name] for name, column in _BYTES.items() if name in checkpoint.bytes}
    columns |= dict(_metrics(checkpoint))
    if "seconds_round" in checkpoint.metrics:
        columns["round_seconds"] = np.full(len(clients), float(checkpoint.metrics["seconds_round"]))
    for name, diagnostic in checkpoint.diagnostics.items():
        if isinstance(diagnostic, PerClient | Category):
            columns[f"diagnostic_{name}"] = numbers_of_clients(checkpoint, name, diagnostic)
    return columns


def _metrics(checkpoint: Checkpoint) -> Iterator[tuple[str, np.ndarray]]:
    """The metrics that have a number for each client or participant."""
    descriptions = Descriptions({})
    for name, values in checkpoint.metrics.items():
        axes = descriptions.figure("metrics", name)[1]
        if axes not in _OF_CLIENTS or name in {"participants", "total"}:  # `total` is `test_samples`
            continue
        column = name.replace("client_", "")
        if axes == ("client",):
            yield column, values
        else:
            of_all = np.full(checkpoint.num_clients, np.nan)
            of_all[checkpoint.metrics["participants"]] = values
            yield column, of_all
