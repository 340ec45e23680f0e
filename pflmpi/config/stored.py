"""The configuration of a run on disk, as values, with what the run has recorded beside it."""

import os
from pathlib import Path
from typing import Any

from pflmpi.config import yaml_file
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.store import config_file
from pflmpi.text import shown


def read(run: Path) -> dict[str, Any]:
    """The sections of RUN/config.yaml with "recorded"; of the newest readable checkpoint where that file is gone.

    Raises:
        CheckpointError: neither is there, or one is damaged.
    """
    path = config_file.path(run)
    try:
        values = yaml_file.read_stored(path) if os.path.lexists(path) else _from_checkpoint(run)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    recorded = values.setdefault("recorded", {})
    if not isinstance(recorded, dict) or not isinstance(recorded.get("code", {}), dict):
        damaged = f"{path} is damaged: recorded = {shown(recorded)} is not what a run records"
        raise CheckpointError(f"{damaged}; put it back from a copy")
    return values


def _from_checkpoint(run: Path) -> dict[str, Any]:
    found = config_file.from_checkpoint(run)
    if not found:
        raise CheckpointError(
            f"{run} is not a run: it has no config.yaml and no checkpoint that can be read; "
            "name the folder that `pflmpi run` printed"
        )
    config = yaml_file.parse(found.pop("config"), f"the configuration in the newest checkpoint of {run}")
    return {**config, "recorded": found}
