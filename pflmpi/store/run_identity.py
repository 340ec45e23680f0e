"""The run and round that a file belongs to, so that no file can be mistaken for another."""

import secrets
from collections.abc import Mapping
from pathlib import Path

import yaml

from pflmpi.errors import CheckpointError
from pflmpi.store import checked_hdf5
from pflmpi.store.checked_hdf5 import Checksum
from pflmpi.store.names import round_path
from pflmpi.store.reading import read_attributes


def new_run_id() -> str:
    """A new id of 16 hexadecimal digits; resuming keeps it, and digests do not cover it."""
    return secrets.token_hex(8)


def run_id(run: Path) -> str | None:
    """Id in RUN/config.yaml; None for a run of format 1, or without a readable config.yaml."""
    try:
        config = yaml.safe_load((run / "config.yaml").read_text())
        return str(config["recorded"]["run"])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError):
        return None


def foreign(run: Path, round: int) -> str | None:
    """Why a round file belongs to another round or run, or None; a file of format 1 does not record its run."""
    path, expected = round_path(run, round), run_id(run)
    try:
        found = read_attributes(run, round)
    except CheckpointError as error:
        return str(error)
    if found["round"] != round:
        return f"{path} is the file of round {found['round']}; give it back its name"
    if expected is not None and "run" in found and found["run"] != expected:
        return (
            f"{path} belongs to run {found['run']}, {run}/config.yaml to run {expected}; restore the files of one run"
        )
    return None


def exchanged(run: Path, checksums: Mapping[str, Checksum]) -> dict[str, str]:
    """Shards that are not the files that a round file joined: the problem by name; only their heads are read."""
    problems = {}
    for name, expected in sorted(checksums.items()):
        try:
            if checked_hdf5.recorded_checksum(run / name) != expected:
                problems[name] = f"{run / name} is not the file that the checkpoint was made of; restore that one"
        except CheckpointError as error:
            problems[name] = str(error)
    return problems
