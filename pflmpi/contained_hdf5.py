"""HDF5 files of strangers: nothing is read that is not stored in the file itself.

HDF5 follows external links, external storage and virtual datasets to any file, also to a FIFO, and shows fill values
for what was declared and never stored.
"""

import math
import os
import re
from typing import Any

import h5py as _h5py

h5py: Any = _h5py  # which has no type annotations

_UNWRITTEN = 1 << 26  # bytes of an array that may be declared and not stored, such as zeros
_INFLATION = 1032  # the most that deflate makes of a byte
_FILTERS = {getattr(h5py.h5z, f"FILTER_{name}") for name in ("SHUFFLE", "FLETCHER32", "DEFLATE", "LZF", "SZIP")}


def refuse_external_links(file: Any) -> None:
    """Raise `ValueError` for an open file with a link to another file."""

    def outside(path: bytes, link: Any) -> bytes | None:
        return None if link.type in (h5py.h5l.TYPE_HARD, h5py.h5l.TYPE_SOFT) else path

    # An error must not be raised within the visit: h5py 3.16 turns it into a `SystemError`.
    if (path := file.id.links.visit(outside, info=True)) is not None:
        raise ValueError(f"/{path.decode(errors='replace')} in it is a link to another file, which is not followed")


def refuse_unstored(dataset: Any) -> None:
    """Raise `ValueError` unless the values of a dataset are in its file; before that not even its shape is known."""
    if is_virtual(dataset) or dataset.id.get_create_plist().get_external_count():
        raise ValueError(f"{dataset.name} in it lies in another file, which is not followed")
    creation, size, there = dataset.id.get_create_plist(), dataset.nbytes, dataset.id.get_storage_size()
    filters = [creation.get_filter(number)[0] for number in range(creation.get_nfilters())]
    if not _FILTERS.issuperset(filters) or len({*filters}) < len(filters):
        raise ValueError(f"{dataset.name} in it is packed by the filters {filters}; write it with gzip, or unpacked")
    length = os.stat(dataset.file.filename).st_size
    if creation.get_layout() == h5py.h5d.CHUNKED:
        packed = _INFLATION if filters else 1
        pieces = dataset.id.get_num_chunks() * math.prod(dataset.chunks) * dataset.dtype.itemsize
        there, length = min(pieces, there * packed), length * packed
    if size > min(there, length) + _UNWRITTEN:
        raise ValueError(f"{dataset.name} in it declares {size} bytes, and stores {min(there, length)}")


def refuse_other_sources(dataset: Any, source: "re.Pattern[str]") -> None:
    """Raise `ValueError` for a virtual dataset with a source of another name."""
    creation = dataset.id.get_create_plist()
    for number in range(creation.get_virtual_count() if is_virtual(dataset) else 0):
        if not source.fullmatch(name := creation.get_virtual_filename(number)):
            raise ValueError(f"{dataset.name} in it shows rows of {name!r}, which is no shard; it is not followed")


def is_virtual(dataset: Any) -> bool:
    """Whether a dataset shows values that lie elsewhere."""
    return bool(dataset.id.get_create_plist().get_layout() == h5py.h5d.VIRTUAL)
