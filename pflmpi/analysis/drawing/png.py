"""Cells as a PNG with a palette, one pixel for each."""

import struct
import zlib
from collections.abc import Sequence

import numpy as np


def of_palette(indices: np.ndarray, colours: Sequence[str]) -> bytes:
    """A PNG of indices [R, C] into colours from 1 on; 0 is transparent."""
    height, width = indices.shape
    rows = np.zeros((height, width + 1), np.uint8)  # a filter, none, before each row
    rows[:, 1:] = indices
    palette = bytes(3) + bytes.fromhex("".join(colour.removeprefix("#") for colour in colours))
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0),
        b"PLTE": palette,
        b"tRNS": b"\0",
        b"IDAT": zlib.compress(rows.tobytes(), 9),
        b"IEND": b"",
    }
    parts = (
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks.items()
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
