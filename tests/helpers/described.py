"""What an HDF5 file of pflmpi says of itself, read and changed as by a tool."""

import json
import zlib
from typing import Any

import numpy as np


def about(file):
    description: dict[str, Any] = json.loads(file.attrs["about"])
    return description


def has_values(dataset):
    """Whether it is more than the name of an axis."""
    return not bytes(dataset.attrs.get("NAME", b"")).startswith(b"This is a netCDF dimension but not")


def restate(file, values):
    """Put texts in place of what a file says."""
    file.attrs["about"] = json.dumps(values)


def stamp(dataset, checksum=None):
    """Say that an array has a checksum: by default its own."""
    description = about(dataset.file)
    own = zlib.crc32(np.ascontiguousarray(dataset[()]).tobytes()) if checksum is None else checksum
    description["arrays"][dataset.name.lstrip("/")] = {"crc32": own}
    restate(dataset.file, description)
