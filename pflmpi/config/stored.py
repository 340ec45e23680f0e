"""The configuration of a run on disk, as values, with what the run has recorded beside it."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pflmpi import regular_file
from pflmpi.config import yaml_file
from pflmpi.config.sections import by_key, differing
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.runtime.config import FREE_ON_RESUME
from pflmpi.store import config_file, verify
from pflmpi.text import for_shell, short_repr

_RECORDED = ("device", "ranks", "transport", "code", "privacy", "no_epsilon", "versions")
_MAY_CHANGE = {*FREE_ON_RESUME, *(f"recorded.{key}" for key in _RECORDED)}
_FILES = re.compile(r"[^'\s:]*\.py(?=:)")  # of the user, which may be moved and renamed


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
        damaged = f"{path} is damaged: recorded = {short_repr(recorded)} is not what a run records"
        raise CheckpointError(f"{damaged}; put it back from a copy")
    return values


def last_round(values: Mapping[str, Any]) -> int | None:
    """`training.rounds` of a configuration; None where it does not say."""
    training = values.get("training")
    rounds = training.get("rounds") if isinstance(training, dict) else None
    return rounds if isinstance(rounds, int) else None


def verified(run: Path) -> tuple[dict[str, Any], list[str]]:
    """`read` for all that shows a run: the values, and which of them the newest checkpoint does not vouch for.

    Raises:
        CheckpointError: a value that no continuation changes is another than in the newest checkpoint.
    """
    index = verify.newest_index(run)  # first: of a newer pflmpi nothing else need be as here
    if problem := config_file.damage(run):
        raise CheckpointError(problem)
    values = read(run)
    if index is None:
        return values, ["no checkpoint vouches for its configuration"]
    before, now = (by_key(config) for config in (_written(run, index, values), values))
    notes = []
    for key, (old, new) in differing(before, now).items():
        change = f"{key} = {short_repr(new)} in config.yaml, {short_repr(old)} in round {index['round']}"
        if key in before and key not in _MAY_CHANGE and _objects(old) != _objects(new):
            raise CheckpointError(
                f"{config_file.path(run)} is not the one that the run was written with: {change}; put it back from a "
                f"copy, or delete it: `pflmpi resume {for_shell(run)}` then takes that of the newest checkpoint"
            )
        notes.append(f"{change}: not vouched for by a checkpoint")
    return values, notes


def _objects(value: object) -> str:
    """A value as text, in which objects of the user's files have their names alone."""
    return _FILES.sub("", repr(value))


def _from_checkpoint(run: Path) -> dict[str, Any]:
    written = config_file.from_checkpoint(run)
    if not written:
        raise CheckpointError(
            f"{run} is not a run: it has no config.yaml and no checkpoint that can be read; "
            "name the folder that `pflmpi run` printed"
        )
    return _sections(run, written)


def _written(run: Path, attributes: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """The values in the attributes of a round file; YAML is parsed again only where the text is another."""
    recorded, path = config_file.recorded(attributes), config_file.path(run)
    if path.exists() and regular_file.read(path).decode().startswith(attributes["config"]):
        return {**values, "recorded": recorded}
    return _sections(run, {"config": attributes["config"], **recorded})


def _sections(run: Path, written: dict[str, Any]) -> dict[str, Any]:
    config = yaml_file.parse_mapping(written.pop("config"), f"the configuration in the newest checkpoint of {run}")
    return {**config, "recorded": written}
