"""Texts between ranks, of any length: each rank's to rank 0, and rank 0's to all."""

import numpy as np

from pflmpi.transports.base import Transport


def gather_texts(transport: Transport, text: str) -> list[str] | None:
    """All ranks' texts on rank 0, None elsewhere."""
    content = np.frombuffer(text.encode(), np.uint8).copy()
    lengths = transport.gather(np.array([len(content)], np.int64).view(np.uint8), [8] * transport.size)
    sizes = np.concatenate(lengths) if lengths is not None else np.empty(8 * transport.size, np.uint8)
    transport.broadcast(sizes)
    parts = transport.gather(content, sizes.view(np.int64).tolist())
    return None if parts is None else [bytes(part).decode() for part in parts]


def from_root(transport: Transport, text: str) -> str:
    """Rank 0's text on every rank; the others' is not used."""
    content = np.frombuffer(text.encode(), np.uint8).copy()
    length = np.array([len(content)], np.int64)
    transport.broadcast(length.view(np.uint8))
    if transport.rank != 0:
        content = np.empty(length[0], np.uint8)
    transport.broadcast(content)
    return bytes(content).decode()
