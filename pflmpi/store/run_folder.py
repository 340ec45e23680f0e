"""The folder of a run: which rounds it has, whether they are good, and what is in them."""

from pflmpi.store.digest import digest, digest_of
from pflmpi.store.names import rounds
from pflmpi.store.pruning import discard_after, prune
from pflmpi.store.reading import (
    read_attributes,
    read_bytes,
    read_clients,
    read_diagnostics,
    read_kinds,
    read_layout,
    read_metrics,
    read_received,
    read_server,
)
from pflmpi.store.verification import newest_good, verify

__all__ = [
    "digest",
    "digest_of",
    "discard_after",
    "newest_good",
    "prune",
    "read_attributes",
    "read_bytes",
    "read_clients",
    "read_diagnostics",
    "read_kinds",
    "read_layout",
    "read_metrics",
    "read_received",
    "read_server",
    "rounds",
    "verify",
]
