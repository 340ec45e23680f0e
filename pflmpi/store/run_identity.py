"""The run and round that a file belongs to, so that no file can be mistaken for another."""

import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from pflmpi import regular_file
from pflmpi.errors import CheckpointError
from pflmpi.store import config_file
from pflmpi.store.names import round_path
from pflmpi.store.run_folder import read_attributes

_ID = re.compile(r"^  run: '?(\w+)'?$", re.MULTILINE)


def new_run_id() -> str:
    """A new id of 16 hexadecimal digits; resuming keeps it, and digests do not cover it."""
    return secrets.token_hex(8)


def run_id(run: Path) -> str | None:
    """Id in RUN/config.yaml, or else in the newest checkpoint; None with a damaged config.yaml."""
    try:
        match = _ID.search(
            regular_file.read(config_file.path(run)).decode()
        )  # a hundred times as quick as a YAML parser
        return match[1] if match else None
    except FileNotFoundError:
        return config_file.from_checkpoint(run).get("run")
    except (OSError, UnicodeDecodeError):
        return None


def foreign(run: Path, round: int) -> str | None:
    """Why a round file belongs to another round or run, or None."""
    try:
        return foreign_by(run, round, read_attributes(run, round))
    except CheckpointError as error:
        return str(error)


def foreign_by(run: Path, round: int, attributes: Mapping[str, str | int | float]) -> str | None:
    """`foreign` by the attributes of the file, which have been read."""
    path, expected = round_path(run, round), run_id(run)
    if attributes["round"] != round:
        return f"{path} is the file of round {attributes['round']}; give it back its name"
    if expected is not None and "run" in attributes and attributes["run"] != expected:
        whose = f"{path} belongs to run {attributes['run']}, {run}/config.yaml to run {expected}"
        return f"{whose}; restore the files of one run"
    return None
