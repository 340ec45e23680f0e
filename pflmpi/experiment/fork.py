"""Forks a run: a new run starts from a copy of the state of another after a round, with other options.

The files are written in an order that leaves no run behind if the process is killed: shards, text files, then the round
file, which makes a checkpoint of them, and config.yaml.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pflmpi import atomic, outside
from pflmpi.config import stored
from pflmpi.config.load import Config
from pflmpi.errors import CheckpointError
from pflmpi.experiment import stored_config
from pflmpi.experiment.build import Experiment, try_outside_code
from pflmpi.experiment.restore import array_difference, rebuild
from pflmpi.experiment.run import refuse_existing
from pflmpi.runtime.config import FREE_ON_RESUME
from pflmpi.store import checked_hdf5, config_file, metrics_file, partition_file, pruning, run_folder, verify
from pflmpi.store.checked_hdf5 import HDF5Writer
from pflmpi.store.names import SHARDS, round_path
from pflmpi.store.run_lock import take

_FIXED = ("seed", "data", "partition", "model")  # sections
_FIXED_KEYS = ("training.init", "evaluation.unseen")  # keys of other sections that have an effect before round 1 alone


def fork(run: Path, out: Path, round: int, values: Mapping[str, Any], *, changed_code: bool = False) -> dict[str, Any]:
    """Write a new run that continues another after a round; `pflmpi resume` then goes on with it.

    Args:
        run: it is only read, and may be running.
        out: the folder of the new run, which holds none yet.
        values: the sections of the configuration to continue with.
        changed_code: whether code from outside the package may have changed since the run was written.

    Returns:
        What the new run records: `run` (id of the old one), `round`, `digest`, and `changes`, [before, now] by dotted
        key; of a fork of a fork also `fork`, what the old one records.

    Raises:
        CheckpointError: the round is damaged, or a value cannot change, which is named.
        ConfigError: the configuration is wrong, or the folder cannot be written or holds a run.
    """
    refuse_existing(out)
    if problems := verify.checkpoint(run, round, whole=False):
        raise CheckpointError("; ".join(problems.values()))
    verify.check_metrics(run, round)
    config, changes = stored_config.change_config(run, values)
    _check_changes(run, round, config, changes)
    experiment = rebuild(run, config, torch.device("cpu"), changed_code)
    if difference := array_difference(run, round, experiment, "those with this change"):
        raise CheckpointError(
            f"{run} cannot be forked with {_format_changes(changes)}: its {difference}; leave that as it is, or "
            "start a new run"
        )
    experiment.check_rounds(round)
    with outside.as_config_error():
        experiment = experiment.with_executor(try_outside_code(experiment, config.runtime.executor))
    before = stored.read(run)["recorded"].get("fork")
    origin = {
        "run": config_file.run_id(run),
        "round": round,
        "digest": run_folder.digest(run, round),
        "changes": {key: [*change] for key, change in changes.items()},
        **({"fork": before} if before else {}),
    }
    lock = take(out, {}, False)
    try:
        with atomic.explain_write_error(f"the run folder {out}", "choose another --out"):
            _write(run, out, round, experiment, origin)
    finally:
        lock.release()
    return origin


def without_clients(values: Mapping[str, Any], clients: Sequence[int]) -> dict[str, Any]:
    """Adds clients to `training.without_clients` in the sections of a configuration."""
    training = {**values.get("training", {})}
    before = training.get("without_clients") or []
    return {**values, "training": {**training, "without_clients": [*before, *clients]}} if clients else {**values}


def _check_changes(run: Path, round: int, config: Config, changes: Mapping[str, tuple[Any, Any]]) -> None:
    fixed = {
        key: change
        for key, change in changes.items()
        if (key.partition(".")[0] in _FIXED or key in _FIXED_KEYS) and key not in FREE_ON_RESUME
    }
    if fixed:
        raise CheckpointError(
            f"{run} cannot be forked with {_format_changes(fixed)}: what was decided before its first round stays as "
            "it is; leave it out, or start a new run"
        )
    if config.training.rounds < round:
        raise CheckpointError(f"training.rounds = {config.training.rounds}, and the fork begins after round {round}")


def _format_changes(changes: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{key} = {now!r} (in the run {before!r})" for key, (before, now) in changes.items())


def _write(run: Path, out: Path, round: int, experiment: Experiment, origin: Mapping[str, Any]) -> None:
    recorded = {
        **stored.read(run)["recorded"],
        "run": config_file.new_run_id(),
        "partition_csv": partition_file.checksum(experiment.counts),
        **({"code": code} if (code := stored_config.resumed_code(run, experiment)) else {}),
        "fork": dict(origin),
    }
    for key in ("privacy", "no_epsilon"):  # of the run that it is a fork of
        recorded.pop(key, None)
    (out / SHARDS).mkdir(exist_ok=True)
    pruning.discard_after(out, None)  # what a killed fork has left
    for name in run_folder.read_layout(run, round).files:
        checked_hdf5.copy_file(run / name, out / name)
    stored_config.write_about_data(out, experiment)
    lines = metrics_file.change_columns(verify.check_metrics(run, round), experiment.columns)
    atomic.write(metrics_file.path(out), lines)

    def fill(writer: HDF5Writer) -> None:
        writer.about["metrics_csv"] = list(metrics_file.checksum(lines))
        writer.about["run"] = {"round": round, **stored_config.attributes(experiment, recorded)}

    checked_hdf5.write(round_path(out, round), fill, copied=round_path(run, round))
    stored_config.write_config(out, experiment, recorded)
