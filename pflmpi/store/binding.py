"""Which run and which round a file belongs to, so that no file can stand in for another."""

import secrets
from collections.abc import Mapping
from pathlib import Path

import yaml

from pflmpi.errors import CheckpointError
from pflmpi.store import checked_hdf5
from pflmpi.store.checked_hdf5 import Seal
from pflmpi.store.names import round_path
from pflmpi.store.reading import read_attributes


def new_run_id() -> str:
    """A fresh id of 16 hexadecimal digits. Continuations keep it; digests leave it out."""
    return secrets.token_hex(8)


def run_id(run: Path) -> str | None:
    """The id in RUN/config.yaml; None for a run of format 1, or where there is no readable config.yaml."""
    try:
        config = yaml.safe_load((run / "config.yaml").read_text())
        return str(config["recorded"]["run"])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError):
        return None


def foreign(run: Path, round: int) -> str | None:
    """Why a round file is another round's or another run's, or None; a file of format 1 does not say its run."""
    path, mine = round_path(run, round), run_id(run)
    try:
        said = read_attributes(run, round)
    except CheckpointError as error:
        return str(error)
    if said["round"] != round:
        return f"{path} is the file of round {said['round']}; give it back its name"
    if mine is not None and "run" in said and said["run"] != mine:
        return f"{path} belongs to run {said['run']}, {run}/config.yaml to run {mine}; restore the files of one run"
    return None


def exchanged(run: Path, seals: Mapping[str, Seal]) -> list[str]:
    """Shards that are not the files which a round file joined, one line each; only their heads are read."""
    problems = []
    for name, expected in sorted(seals.items()):
        try:
            if checked_hdf5.seal(run / name) != expected:
                problems.append(f"{run / name} is not the file that the checkpoint was made of; restore that")
        except CheckpointError as error:
            problems.append(str(error))
    return problems
