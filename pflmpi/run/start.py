"""Start a run in a new folder, or resume the one in a folder, on all ranks."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from pflmpi.config.load import Config
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.run import stored_config
from pflmpi.run.build import Experiment, prepare
from pflmpi.run.execute import RankContext, newest, retry_after_rank_loss, run_rounds
from pflmpi.runtime import tensorboard
from pflmpi.runtime.client_state import row_kinds
from pflmpi.runtime.faults import all_or_none, on_root
from pflmpi.runtime.progress import Observer
from pflmpi.store import metrics_file, run_folder, run_identity
from pflmpi.transports.base import Transport

T = TypeVar("T")
_log = logging.getLogger(__name__)


def start(config: Config, folder: Path, context: RankContext, observe: Observer) -> Path:
    """Run a configuration in a new folder; return the folder.

    Raises:
        CollectiveError: on every rank, when it cannot start on one of them.
        Stopped: on every rank, after a complete round, when one of them was asked to stop.
    """
    return start_prepared(_prepare(config, context), folder, context, observe)


def start_prepared(experiment: Experiment, folder: Path, context: RankContext, observe: Observer) -> Path:
    """Run an experiment in a new folder; return the folder."""
    transport = context.transport
    run_id = _from_root(transport, run_identity.new_run_id)
    run = Path(_from_root(transport, lambda: _create(folder, experiment, transport, run_id)))
    run_rounds(experiment, run, run_id, context, None, observe)
    return run


def resume(config: Config, run: Path, context: RankContext, observe: Observer, *, changed_code: bool = False) -> Path:
    """Continue a run from its newest good checkpoint; `config` is from `stored_config`.

    Args:
        changed_code: continue too where code from outside the package has changed.
    """
    transport = context.transport
    for change in _together(transport, lambda: stored_config.changed_code(run, config, changed_code)):
        _log.warning("%s; going on with the changed code", change)
    experiment = _prepare(config, context, run)
    run_id = _from_root(transport, lambda: run_identity.run_id(run) or run_identity.new_run_id())
    done = int(_from_root(transport, lambda: _rewrite(run, experiment, transport, run_id)))
    run_rounds(experiment, run, run_id, context, done, observe)
    return run


def start_or_resume(
    config: Config, run: Path, context: RankContext, observe: Observer, *, changed_code: bool = False
) -> Path:
    """Start the run in a folder, or resume it if it has a checkpoint; see `resume`."""
    transport = context.transport
    if _from_root(transport, lambda: _kept(run)):
        stored = _together(transport, lambda: stored_config.resumed_config(run, config))
        return resume(stored, run, context, observe, changed_code=changed_code)
    return start(config, run, context, observe)


def reopened(run: Path, overrides: Sequence[str], device: torch.device, *, changed_code: bool = False) -> Experiment:
    """The experiment of a run, on the data that it was made with; for overrides see `stored_config`."""
    config = stored_config.stored_config(run, overrides)
    stored_config.changed_code(run, config, changed_code)
    experiment = prepare(config, device)
    stored_config.check_same_data(run, experiment)
    return experiment


def _prepare(config: Config, context: RankContext, run: Path | None = None) -> Experiment:
    """The experiment, on the data that the run to be resumed was made with."""

    def make() -> Experiment:
        if config.output.tensorboard and context.transport.rank == 0:
            tensorboard.check_installed()
        experiment = prepare(config, context.device, context.gpu_models)
        if run is None:
            return experiment
        stored_config.check_same_data(run, experiment)
        return replace(experiment, computed_on=stored_config.devices_so_far(run, experiment))

    return _together(context.transport, make)


def _together(transport: Transport, function: Callable[[], T]) -> T:
    """The result of a function that succeeds on all ranks; see `all_or_none`."""
    return retry_after_rank_loss(transport, lambda: all_or_none(transport, function))


def _from_root(transport: Transport, function: Callable[[], str]) -> str:
    """The text of a function on rank 0, on every rank; where rank 0 dies, the next one calls it again."""
    return retry_after_rank_loss(transport, lambda: on_root(transport, function))


def _create(folder: Path, experiment: Experiment, transport: Transport, run_id: str) -> str:
    """Make the folder of a new run, and return its name; a folder with another run is refused."""
    try:
        if (folder / "config.yaml").exists() and run_identity.run_id(folder) != run_id:
            raise ConfigError(
                f"{folder} holds a run already; continue it with `pflmpi resume {folder}` or choose another --out"
            )
        (folder / "shards").mkdir(parents=True, exist_ok=True)
        stored_config.write(folder, experiment, transport, run_id)
        metrics_file.restart(folder, 0)
    except OSError as error:
        raise ConfigError(f"cannot write the run folder {folder}: {error.strerror}; choose another --out") from error
    return str(folder)


def _rewrite(run: Path, experiment: Experiment, transport: Transport, run_id: str) -> str:
    """Write the configuration with which a run is resumed; gives its newest good round."""
    done = _newest_matching(run, experiment)
    stored_config.write(run, experiment, transport, run_id)
    return str(done)


def _kept(run: Path) -> str:
    """Whether a run has a checkpoint ("" if not); what it has left without one is removed."""
    if run_folder.rounds(run):
        return "yes"
    (run / "config.yaml").unlink(missing_ok=True)
    return ""


def _newest_matching(run: Path, experiment: Experiment) -> int:
    """Newest good round of a run; raise `CheckpointError` unless its configuration and client state match."""
    done = newest(run)
    stored_config.check_round(run, done, experiment.config)
    found = run_folder.read_kinds(run, done)
    for cohort, kinds in row_kinds(experiment.templates).items():
        there = found.get(cohort, {})
        other = sorted(path for path in kinds.keys() | there.keys() if kinds.get(path) != there.get(path))
        if other:
            raise CheckpointError(
                f"{run} cannot be continued: its clients keep other arrays than those of this pflmpi, such as "
                f"{other[0]}; continue it with the version that wrote it, or start a new run"
            )
    return done
