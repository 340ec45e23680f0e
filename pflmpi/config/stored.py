"""The configuration of a run on disk, as plain values, with the section `recorded`."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pflmpi import regular_file
from pflmpi.config import yaml_file
from pflmpi.config.sections import by_key, find_differences
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.runtime.config import FREE_ON_RESUME
from pflmpi.store import config_file, verify
from pflmpi.text import for_shell, short_repr

_RECORDED = ("device", "ranks", "transport", "code", "privacy", "no_epsilon", "versions")
_MAY_CHANGE = {*FREE_ON_RESUME, *(f"recorded.{key}" for key in _RECORDED)}
_FILES = re.compile(r"[^'\s:]*\.py(?=:)")  # Python files of the user, which may be moved and renamed


def read(run: Path) -> dict[str, Any]:
    """Reads RUN/config.yaml, or where that is missing, the configuration in the newest readable checkpoint.

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
        damaged = f"{path} is damaged: recorded = {short_repr(recorded)} is not what a run records"
        raise CheckpointError(f"{damaged}; put it back from a copy")
    return values


def last_round(values: Mapping[str, Any]) -> int | None:
    """Returns `training.rounds` of a configuration; None where it is missing."""
    training = values.get("training")
    rounds = training.get("rounds") if isinstance(training, dict) else None
    return rounds if isinstance(rounds, int) else None


def read_verified(run: Path) -> tuple[dict[str, Any], list[str]]:
    """Reads the configuration and compares it with the newest checkpoint; returns the values, and notes on differences.

    Raises:
        CheckpointError: a value that cannot change on resume differs from the newest checkpoint.
    """
    index = verify.verify_newest_attributes(
        run
    )  # first: it refuses a newer pflmpi, whose other files may differ in any way
    if problem := config_file.find_damage(run):
        raise CheckpointError(problem)
    values = read(run)
    if index is None:
        return values, ["no checkpoint vouches for its configuration"]
    before, now = by_key(_values_in_checkpoint(run, index, values)), by_key(values)
    notes = []
    for key, (old, new) in find_differences(before, now).items():
        change = f"{key} = {short_repr(new)} in config.yaml, {short_repr(old)} in round {index['round']}"
        if key in before and key not in _MAY_CHANGE and _without_files(old) != _without_files(new):
            raise CheckpointError(
                f"{config_file.path(run)} is not the one that the run was written with: {change}; put it back from a "
                f"copy, or delete it: `pflmpi resume {for_shell(run)}` then takes that of the newest checkpoint"
            )
        notes.append(f"{change}: not vouched for by a checkpoint")
    return values, notes


def _without_files(value: object) -> str:
    """Formats a value without the paths of the user's Python files."""
    return _FILES.sub("", repr(value))


def _from_checkpoint(run: Path) -> dict[str, Any]:
    attributes = config_file.read_newest_attributes(run)
    if attributes is None:
        raise CheckpointError(
            f"{run} is not a run: it has no config.yaml and no checkpoint that can be read; "
            "name the folder that `pflmpi run` printed"
        )
    return _parse_attributes(run, attributes)


def _values_in_checkpoint(run: Path, attributes: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values in the attributes of a round file; parses YAML only if the text differs from config.yaml."""
    path = config_file.path(run)
    if path.exists() and regular_file.read(path).decode().startswith(attributes["config"]):
        return {**values, "recorded": config_file.recorded(attributes)}
    return _parse_attributes(run, attributes)


def _parse_attributes(run: Path, attributes: Mapping[str, Any]) -> dict[str, Any]:
    where = f"the configuration in the newest checkpoint of {run}"
    return {**yaml_file.parse_stored(attributes["config"], where), "recorded": config_file.recorded(attributes)}
