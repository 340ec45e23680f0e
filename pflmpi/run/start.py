"""A run from its folder's point of view: start one, continue one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pflmpi import atomic
from pflmpi.config import load as configuration
from pflmpi.config.load import Config
from pflmpi.config.sections import flat, override
from pflmpi.config.yaml_file import dump, parse, read
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.run.build import Experiment, prepare
from pflmpi.run.execute import (
    RankContext,
    newest_fitting,
    recorded,
    retry_after_rank_loss,
    run_rounds,
)
from pflmpi.runtime import tensorboard
from pflmpi.runtime.config import FREE_ON_RESUME
from pflmpi.runtime.faults import all_or_none
from pflmpi.runtime.progress import Observer
from pflmpi.store import binding, metrics_file, partition_file, run_folder
from pflmpi.transports.text import from_root

__all__ = [
    "RankContext",
    "allowed_changes",
    "continuing",
    "differences",
    "execute",
    "refuse",
    "reopened",
    "resume",
    "start",
    "start_or_resume",
    "stored_config",
]


def start(config: Config, folder: Path, context: RankContext, observe: Observer) -> Path:
    """Run an experiment in a new folder; return the folder.

    Raises:
        CollectiveError: on every rank, when it cannot start on one of them.
        Stopped: on every rank, after a complete round, when one of them was asked to stop.
    """
    return execute(_prepared(config, context), folder, context, observe)


def execute(experiment: Experiment, folder: Path, context: RankContext, observe: Observer) -> Path:
    """Run a prepared experiment in a new folder; return the folder."""
    run = all_or_none(context.transport, lambda: _create(folder, experiment, context))
    run = Path(from_root(context.transport, str(run)))
    run_rounds(experiment, run, context, None, observe)
    return run


def resume(config: Config, run: Path, context: RankContext, observe: Observer) -> Path:
    """Continue a run from its newest good checkpoint; `config` is from `stored_config`."""
    transport = context.transport
    experiment = _prepared(config, context, run)
    done = all_or_none(transport, lambda: _resume_after(run, experiment) if transport.rank == 0 else 0)
    done = int(from_root(transport, str(done)))
    if transport.rank == 0:
        _write_config(run, experiment, context, binding.run_id(run) or binding.new_run_id())
    run_rounds(experiment, run, context, done, observe)
    return run


def _resume_after(run: Path, experiment: Experiment) -> int:
    """The newest good round, after checking that config.yaml is the one that it was written with."""
    done = newest_fitting(run, experiment)
    written = flat(configuration.parse(parse(str(run_folder.read_attributes(run, done)["config"]), "")).resolved())
    now = flat(configuration.parse(_raw(run)).resolved())
    changed = [
        f"{key} = {now.get(key)!r}, written with {written.get(key)!r}"
        for key in sorted(written.keys() | now.keys())
        if key not in FREE_ON_RESUME and written.get(key) != now.get(key)
    ]
    if changed:
        raise CheckpointError(
            f"{run / 'config.yaml'} is not the one that round {done} was written with: {', '.join(changed)}; put it "
            "back from a copy, or set these values back"
        )
    return done


def reopened(run: Path, overrides: Sequence[str], device: torch.device) -> Experiment:
    """Return the experiment of a run, on the data that it was made with; for overrides see `stored_config`."""
    return _same_data(prepare(stored_config(run, overrides), device), run)


def start_or_resume(config: Config, run: Path, context: RankContext, observe: Observer) -> Path:
    """Continue the run in a folder with this configuration; start it if nothing is there to continue from."""
    transport = context.transport
    there = all_or_none(transport, lambda: int(transport.rank == 0 and bool(run_folder.rounds(run))))
    if int(from_root(transport, str(there))):
        return resume(all_or_none(transport, lambda: continuing(run, config)), run, context, observe)
    if transport.rank == 0:
        (run / "config.yaml").unlink(missing_ok=True)  # of a run that was stopped before its first checkpoint
    return start(config, run, context, observe)


def continuing(run: Path, config: Config) -> Config:
    """Return the configuration that continues a run as `config` wants it, refusing what would change its results."""
    values = _raw(run)
    for key, (_, new) in allowed_changes(run, config).items():
        section, _, name = key.partition(".")
        values[section] = {**values[section], name: new}
    return configuration.parse(values)


def allowed_changes(run: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """Return what a continuation of a run with this configuration changes; what it may not change is refused."""
    different = differences(run, config)
    executor: str = config.runtime.executor
    if executor == "auto":  # a run has written what it came to
        executor, _ = different.pop("runtime.executor", (executor, executor))
    if config.runtime.lanes is None or executor == "loop":
        different.pop("runtime.lanes", None)
    refuse(run, different)
    return different


def stored_config(run: Path, overrides: Sequence[str]) -> Config:
    """Return the configuration of a run, refusing overrides that would change its results.

    `training.rounds` may change (upwards), and what only says where things are computed.
    """
    after = configuration.parse(override(_raw(run), overrides))
    refuse(run, differences(run, after))
    return after


def differences(run: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """Return the keys in which a configuration differs from a run's: its value in the run, its value now."""
    old, new = flat(configuration.parse(_raw(run)).resolved()), flat(config.resolved())
    return {
        key: (old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)
    }


def refuse(run: Path, different: Mapping[str, tuple[Any, Any]]) -> None:
    """Refuse to continue a run with differences that would change its results."""
    found = [
        f"{key} = {old!r} in the run, {new!r} now" for key, (old, new) in different.items() if key not in FREE_ON_RESUME
    ]
    if found:
        raise CheckpointError(
            f"{run} cannot be continued with another configuration: {', '.join(found)}; "
            "leave these as they are, or start a new run"
        )


def _prepared(config: Config, context: RankContext, run: Path | None = None) -> Experiment:
    """Return the experiment, on the data that the run to be continued was made with."""

    def make() -> Experiment:
        if config.output.tensorboard and context.transport.rank == 0:
            tensorboard.check_installed()
        experiment = prepare(config, context.device)
        return experiment if run is None else _same_data(experiment, run)

    return retry_after_rank_loss(context.transport, lambda: all_or_none(context.transport, make))


def _write_config(run: Path, experiment: Experiment, context: RankContext, run_name: str) -> None:
    """Write what the run is: who holds how many samples of which class, and, last, its configuration."""
    federation = experiment.federation
    partition_file.write(run, partition_file.Counts(federation.class_counts, federation.test_class_counts))
    content = dump({**experiment.config.resolved(), "recorded": recorded(experiment, context, run_name)})
    with atomic.replacing(run / "config.yaml") as descriptor:
        atomic.write_at(descriptor, content.encode(), 0)


def _create(folder: Path, experiment: Experiment, context: RankContext) -> Path:
    """Make the folder of a new run, on rank 0; a folder that holds a run is refused."""
    if context.transport.rank != 0:
        return folder
    if (folder / "config.yaml").exists():
        raise ConfigError(
            f"{folder} holds a run already; continue it with `pflmpi resume {folder}` or choose another --out"
        )
    try:
        (folder / "shards").mkdir(parents=True, exist_ok=True)
        _write_config(folder, experiment, context, binding.new_run_id())
        metrics_file.restart(folder, 0)
    except OSError as error:
        raise ConfigError(f"cannot write the run folder {folder}: {error.strerror}; choose another --out") from error
    return folder


def _same_data(experiment: Experiment, run: Path) -> Experiment:
    recorded = _stored(run).get("recorded", {})
    found = {"data": experiment.federation.dataset.digest, "partition": experiment.federation.digest}
    for key, value in found.items():
        if recorded.get(key, value) != value:
            raise CheckpointError(
                f"the {key} has changed since {run} was written: hash {recorded[key][:12]} then, {value[:12]} now; "
                "put back the same files, or start a new run"
            )
    return experiment


def _stored(run: Path) -> dict[str, Any]:
    if not (run / "config.yaml").exists():
        raise CheckpointError(f"{run} is not a run: it has no config.yaml; name the folder that `pflmpi run` printed")
    return read(run / "config.yaml")


def _raw(run: Path) -> dict[str, Any]:
    return {key: value for key, value in _stored(run).items() if key != "recorded"}
