"""Texts between ranks: one of each rank, of any length, to rank 0; one of rank 0 to all."""

import numpy as np

from pflmpi.transports.base import Transport

_NAME = 1024  # bytes of a text for all


def gather_texts(transport: Transport, text: str) -> list[str] | None:
    """Return all ranks' texts on rank 0, None elsewhere."""
    content = np.frombuffer(text.encode(), np.uint8)
    lengths = transport.gather(np.array([len(content)], np.int64).view(np.uint8), [8] * transport.size)
    sizes = np.concatenate(lengths) if lengths is not None else np.empty(8 * transport.size, np.uint8)
    transport.broadcast(sizes)
    parts = transport.gather(content.copy(), sizes.view(np.int64).tolist())
    return None if parts is None else [bytes(part).decode() for part in parts]


def from_root(transport: Transport, text: str) -> str:
    """Return rank 0's text, of at most 1024 bytes, on every rank."""
    buffer = np.frombuffer(text.encode().ljust(_NAME, b"\0"), np.uint8).copy()
    transport.broadcast(buffer)
    return bytes(buffer).rstrip(b"\0").decode()
