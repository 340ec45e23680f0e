"""Whether the files of the dataset are there, as the dataset's own source looks for them."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from pflmpi.data.config import DataConfig, PartitionConfig
from pflmpi.data.sources import SOURCES
from pflmpi.data.sources.base import SHARED_FOLDER
from pflmpi.doctor.facts import Data
from pflmpi.errors import PflmpiError


def dataset(data: DataConfig | None, partition: PartitionConfig | None, environ: Mapping[str, str]) -> Data:
    """Return what this rank sees of the dataset and of a saved partition; without a configuration, of the folder."""
    root = (data.root if data else None) or environ.get("PFLMPI_DATA", "")
    folder = Path(root).expanduser()
    if data is None:
        missing = f"PFLMPI_DATA = {root!r} is no folder" if root and not folder.is_dir() else ""
        return Data(root=root, error=missing)
    try:
        source = SOURCES[data.name]
        if source.embedded:
            root, files = "", []
        elif not root:
            return Data(name=data.name, error=f"no data folder is set for dataset {data.name!r}; {SHARED_FOLDER}")
        else:
            files = source.files(folder)
        if partition and partition.path:
            files = [*files, _readable(Path(partition.path))]
    except PflmpiError as error:
        return Data(name=data.name, root=root, error=str(error), download=data.download)
    sizes = [(path.name, os.path.getsize(path)) for path in files]
    return Data(name=data.name, root=root, files=len(files), digest=hashlib.sha256(repr(sizes).encode()).hexdigest())


def _readable(partition: Path) -> Path:
    if not os.access(partition, os.R_OK):
        raise PflmpiError(f"the saved partition {partition} cannot be read")
    return partition
