"""Values of a diagnostic in a checkpoint: what clients keep, what the server keeps, or what was measured."""

import numpy as np

from pflmpi.analysis.checkpoint import Checkpoint
from pflmpi.learning.diagnostics import Diagnostic

ClientValues = tuple[np.ndarray, np.ndarray]  # the ascending ids [m] of clients, and the values of each, [m, ...]


def rows(checkpoint: Checkpoint, name: str, diagnostic: Diagnostic) -> ClientValues | None:
    """A diagnostic's values by client, flattened to [m, n]; None where the checkpoint has none."""
    if diagnostic.kept:
        return kept_rows(checkpoint, diagnostic.kept)
    if diagnostic.server:
        everyone = checkpoint.server_leaf(diagnostic.server)
        return None if everyone is None else (np.arange(len(everyone)), everyone.reshape(len(everyone), -1))
    clients, values = checkpoint.participants, checkpoint.measured.get(name)
    return None if clients is None or values is None else (clients, values.reshape(len(clients), -1))


def kept_rows(checkpoint: Checkpoint, path: str) -> ClientValues | None:
    """What clients keep at or below a path, flattened to [m, n]; None where nobody does."""
    one = len(checkpoint.cohorts) == 1
    leaves = dict.fromkeys(leaf if one else leaf.partition("/")[2] for leaf in checkpoint.clients)
    arrays = [kept_array(checkpoint, leaf) for leaf in leaves if leaf == path or leaf.startswith(f"{path}/")]
    found = [array for array in arrays if array is not None]
    if not found:
        return None
    return found[0][0], np.concatenate([values.reshape(len(clients), -1) for clients, values in found], axis=1)


def kept_array(checkpoint: Checkpoint, path: str) -> ClientValues | None:
    """One array of the clients of all cohorts, [m, ...]; None where nobody keeps it."""
    one = len(checkpoint.cohorts) == 1
    found = [
        (clients, np.asarray(checkpoint.clients[leaf]))
        for cohort, clients in checkpoint.cohorts.items()
        if (leaf := path if one else f"{cohort}/{path}") in checkpoint.clients
    ]
    if not found:
        return None
    clients, values = (np.concatenate(parts) for parts in zip(*found, strict=True))
    order = np.argsort(clients, kind="stable")
    return clients[order], values[order]


def label(name: str, diagnostic: Diagnostic) -> str:
    """Text at the axis of the values."""
    words = name.replace("_", " ")
    return f"{words} ({diagnostic.unit})" if diagnostic.unit else words


def sentences(*texts: str) -> str:
    """Texts one after the other, each ending with a full stop; empty ones are left out.

    >>> sentences("One", "", "Two.")
    'One. Two.'
    """
    return " ".join(text if text.endswith(".") else f"{text}." for text in texts if text)
