"""Checks of untrusted HDF5 files: all data must be stored in the file itself.

HDF5 follows external links, external storage and virtual datasets to any file, even a FIFO, and returns fill values for
data that was declared and never stored.
"""

import math
import os
import re
from typing import Any

import h5py as _h5py

h5py: Any = _h5py  # it has no type annotations

_UNWRITTEN = 1 << 26  # bytes that an array may declare beyond those stored, such as fill values
_INFLATION = 1032  # highest compression ratio of deflate
_FILTERS = {getattr(h5py.h5z, f"FILTER_{name}") for name in ("SHUFFLE", "FLETCHER32", "DEFLATE", "LZF", "SZIP")}


def refuse_external_links(file: Any) -> None:
    """Raise `ValueError` for an open file with a link to another file."""

    def external(path: bytes, link: Any) -> str | None:  # returning a value ends the visit
        return None if link.type in (h5py.h5l.TYPE_HARD, h5py.h5l.TYPE_SOFT) else path.decode(errors="replace")

    if (path := file.id.links.visit(external, info=True)) is not None:
        raise ValueError(f"/{path} in it is a link to another file, which is not followed")


def refuse_unstored(dataset: Any) -> None:
    """Raise `ValueError` unless the values of a dataset are stored in its file; call it before trusting its shape."""
    creation = dataset.id.get_create_plist()
    layout = creation.get_layout()
    if layout == h5py.h5d.VIRTUAL or creation.get_external_count():
        raise ValueError(f"{dataset.name} in it lies in another file, which is not followed")
    filters = [creation.get_filter(number)[0] for number in range(creation.get_nfilters())]
    if not _FILTERS.issuperset(filters) or len({*filters}) < len(filters):
        raise ValueError(f"{dataset.name} in it is packed by the filters {filters}; write it with gzip, or unpacked")
    if dataset.nbytes <= _UNWRITTEN:  # whatever is stored
        return
    stored_bytes = min(dataset.id.get_storage_size(), os.stat(dataset.file.filename).st_size)
    if layout == h5py.h5d.CHUNKED:
        chunk_bytes = dataset.id.get_num_chunks() * math.prod(dataset.chunks) * dataset.dtype.itemsize
        stored_bytes = min(chunk_bytes, stored_bytes * (_INFLATION if filters else 1))
    if dataset.nbytes > stored_bytes + _UNWRITTEN:
        raise ValueError(f"{dataset.name} in it declares {dataset.nbytes} bytes, and stores {stored_bytes}")


def refuse_other_sources(dataset: Any, source: "re.Pattern[str]") -> None:
    """Raise `ValueError` for a virtual dataset with a source file whose name does not match."""
    creation = dataset.id.get_create_plist()
    for number in range(creation.get_virtual_count() if is_virtual(dataset) else 0):
        if not source.fullmatch(name := creation.get_virtual_filename(number)):
            raise ValueError(f"{dataset.name} in it shows rows of {name!r}, which is no shard; it is not followed")


def is_virtual(dataset: Any) -> bool:
    """Whether a dataset is virtual: its values are in other datasets."""
    return bool(dataset.id.get_create_plist().get_layout() == h5py.h5d.VIRTUAL)
