"""What is requested: the configuration, of the command or of the run, and the files of its dataset."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pflmpi.data.sources import SOURCES
from pflmpi.data.sources.base import SHARED_FOLDER
from pflmpi.doctor.facts import Data, Settings
from pflmpi.errors import DataError, PflmpiError

if TYPE_CHECKING:
    from pflmpi.config.load import Config

_RUNTIME_KEYS = {"transport", "device", "threads"}  # the fields of `Settings`


def read_config(path: Path | None, run: Path | None) -> tuple["Config | None", Settings]:
    """The configuration of a file, or else of a run, and what the checks need of it.

    None, and the default settings, without a configuration; with an `error` if it cannot be used.
    """
    of_run = path is None
    path = path or (run / "config.yaml" if run else None)
    if path is None or (of_run and not path.is_file()):
        return None, Settings()
    try:
        from pflmpi.config.load import parse
        from pflmpi.config.sections import located
        from pflmpi.config.yaml_file import dump, read
        from pflmpi.experiment.code import code_hashes

        raw = located(read(path), path.parent)
        if of_run:
            raw.pop("recorded", None)  # what a run adds to its configuration
        config = parse(raw)
        code = code_hashes(config)
    except PflmpiError as error:
        return None, Settings(error=str(error))
    except (ImportError, OSError):  # torch is broken, which a check of its own finds
        return None, Settings()
    digest = hashlib.sha256(dump({**config.resolved(), "code": code}).encode()).hexdigest()
    return config, Settings(digest=digest, **config.runtime.model_dump(include=_RUNTIME_KEYS))


def find_data(config: "Config | None", environ: Mapping[str, str]) -> Data:
    """Look for the files of the dataset, and for a saved partition; without a configuration, for the data folder."""
    root = (config.data.root if config else None) or environ.get("PFLMPI_DATA", "")
    folder = Path(root).expanduser()
    if config is None:
        missing = f"PFLMPI_DATA = {root!r} is no folder" if root and not folder.is_dir() else ""
        return Data(root=root, error=missing)
    name, saved = config.data.name, config.partition.path
    files: list[Path] = []
    try:
        source = None if config.data.path else SOURCES[name]
        if source is None:
            root, own = "", Path(str(config.data.path))
            files = [own] if own.is_file() else sorted(file for file in own.rglob("*") if file.is_file())
            if not files:
                raise DataError(f"data.path = {str(own)!r} does not exist, or is an empty folder")
        elif isinstance(source, type) or source.embedded:
            root = ""
        elif root:
            files = source.files(folder)
        else:
            return Data(name=name, error=f"no data folder is set for dataset {name!r}; {SHARED_FOLDER}")
        if saved:
            if not os.access(saved, os.R_OK):
                raise DataError(f"the saved partition {saved} cannot be read")
            files = [*files, Path(saved)]
    except PflmpiError as error:
        return Data(name=name, root=root, error=str(error), download=config.data.download)
    sizes = [(path.name, os.path.getsize(path)) for path in files]
    return Data(name=name, root=root, files=len(files), digest=hashlib.sha256(repr(sizes).encode()).hexdigest())
