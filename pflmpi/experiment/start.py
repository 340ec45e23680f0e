"""Start a run in a new folder, or resume the one in a folder, on all ranks."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from pflmpi import outside
from pflmpi.algorithms.base import CannotJoin
from pflmpi.config.load import Config
from pflmpi.data.dataset import unscaled
from pflmpi.data.federation import resolved_split
from pflmpi.errors import ConfigError
from pflmpi.experiment import stored_config
from pflmpi.experiment.build import Draft, Experiment, check_executor, complete, draft, load_federation
from pflmpi.experiment.execute import RankContext, run_rounds
from pflmpi.experiment.recorded_data import on_recorded_data
from pflmpi.experiment.restore import continue_after
from pflmpi.models import MODELS
from pflmpi.runtime.faults import all_or_none, on_root
from pflmpi.runtime.progress import Observer
from pflmpi.runtime.state.storage import check_scratch
from pflmpi.runtime.trackers.tracking import check_installed
from pflmpi.store import config_file, metrics_file, run_folder, run_identity
from pflmpi.store.run_lock import RunLock, take
from pflmpi.text import for_shell
from pflmpi.transports.base import Transport

_log = logging.getLogger(__name__)


def start(config: Config, folder: Path, context: RankContext, observe: Observer) -> Path:
    """Run a configuration in a new folder; return the folder.

    Raises:
        CollectiveError: on every rank, when it cannot start on one of them.
        Stopped: on every rank, after a complete round, when one of them was asked to stop.
    """
    return start_prepared(_prepare(config, context), folder, context, observe)


def start_prepared(
    experiment: Experiment, folder: Path, context: RankContext, observe: Observer, anew: bool = False
) -> Path:
    """Run an experiment in a new folder, rank 0's; return the folder.

    Args:
        anew: also in the folder of a run that was stopped before its first checkpoint.
    """
    transport = context.transport
    run = Path(on_root(transport, lambda: str(folder)))  # a name by the time may differ between ranks
    with _locked(run, context, run_identity.new_run_id) as (lock, run_id):
        all_or_none(
            transport, lambda: _create(run, experiment, transport, run_id, anew) if transport.rank == 0 else None
        )
        run_rounds(experiment, run, run_id, context, lock, None, observe)
    return run


def refuse_existing(run: Path) -> None:
    """Raise `ConfigError` for a folder that holds a run, or that cannot be one because a file is in its place."""
    if config_file.path(run).exists() or run_folder.rounds(run):
        resumed = f"continue it with `pflmpi resume {for_shell(run)}`"
        how = resumed if run_folder.rounds(run) else "it has no checkpoint: add --continue"
        raise ConfigError(f"{run} holds a run already; {how}, or choose another --out")
    if any(place.is_file() for place in (run, *run.parents)):
        raise ConfigError(f"cannot write the run folder {run}: Not a directory; choose another --out")


def resume(config: Config, run: Path, context: RankContext, observe: Observer, *, changed_code: bool = False) -> Path:
    """Continue a run from its newest good checkpoint; `config` is from `stored_config`.

    Args:
        changed_code: continue too where code from outside the package has changed.
    """
    for change in all_or_none(context.transport, lambda: stored_config.changed_code(run, config, changed_code)):
        _log.warning("%s; going on with the changed code", change)
    experiment = _prepare(config, context, run)
    with _locked(run, context, lambda: _run_id(run)) as (lock, run_id):
        _run_rest(experiment, run, run_id, context, lock, observe)
    return run


def start_or_resume(
    config: Config, run: Path, context: RankContext, observe: Observer, *, changed_code: bool = False
) -> Path:
    """Start the run in a folder, or resume it if it has a checkpoint; see `resume`."""
    if on_root(context.transport, lambda: "yes" if run_folder.rounds(run) else ""):
        stored = all_or_none(context.transport, lambda: stored_config.resumed_config(run, config))
        return resume(stored, run, context, observe, changed_code=changed_code)
    return start_prepared(_prepare(config, context), run, context, observe, anew=True)


def reopened(run: Path, overrides: Sequence[str], device: torch.device, *, changed_code: bool = False) -> Experiment:
    """The experiment of a run, on the data that it was made with; for overrides see `stored_config`."""
    config = stored_config.stored_config(run, overrides)
    stored_config.changed_code(run, config, changed_code)
    with outside.as_config_error():
        drafted = draft(config, load_federation(config), device)
        return on_recorded_data(run, complete(drafted, drafted.runtime.executor))


def _prepare(config: Config, context: RankContext, run: Path | None = None) -> Experiment:
    """The experiment, on the data that the run to be resumed was made with."""

    transport = context.transport

    def bound() -> Draft:
        if transport.rank == 0:
            check_installed(config.output)
        check_scratch(config.runtime)
        with outside.as_config_error():
            return draft(config, load_federation(config), context.device, context.gpu_models)

    def checked() -> str:  # a run that goes on was checked when it began, and has recorded what was chosen
        with outside.as_config_error():
            return check_executor(drafted) if run is None else drafted.runtime.executor

    def make() -> Experiment:
        with outside.as_config_error():
            experiment = complete(drafted, executor)
        if isinstance(experiment.newcomer, CannotJoin) and transport.rank == 0:
            _log.warning("unseen clients are not tested: %s", experiment.newcomer.why)
        if run is None:
            if context.transport.rank == 0:
                _say_what_was_assumed(experiment)
            return experiment
        experiment = on_recorded_data(run, experiment)
        return replace(experiment, computed_on=stored_config.devices_so_far(run, experiment))

    drafted = all_or_none(transport, bound)
    executor = on_root(transport, checked)
    return all_or_none(transport, make)


def _say_what_was_assumed(experiment: Experiment) -> None:
    """Log what is not in the configuration of data of one's own, and what it may lack."""
    config, dataset = experiment.config, experiment.federation.dataset
    chosen = config.data.split == "auto" and config.partition.path is None
    if chosen and resolved_split(config.data, dataset) == "official":
        marked = int(dataset.official_test.sum())
        _log.warning("tests on the %d samples that the data marks as test (data.split: auto)", marked)
    tokens = dataset.may_be_tokens and any(MODELS.reference(MODELS.name_of(type(model))) for model in config.models)
    if config.data.normalize == "fixed" and not tokens and (problem := unscaled(dataset)):
        _log.warning("%s", problem)


@contextlib.contextmanager
def _locked(run: Path, context: RankContext, function: Callable[[], str]) -> Iterator[tuple[RunLock, str]]:
    """Hold the lock of a run on rank 0; yields it, and the text that `function` then returned there, on every rank."""
    taken: list[RunLock] = []

    def locked() -> str:
        taken.append(take(run, context.jobs, context.take_over))
        return f"{taken[0].token} {function()}"

    try:
        token, _, text = on_root(context.transport, locked).partition(" ")
        taken = taken or [RunLock(run, token)]
        context.stop.at_once = taken[0].drop
        yield taken[0], text
    finally:
        for lock in taken:
            lock.release()


def _run_id(run: Path) -> str:
    return run_identity.run_id(run) or run_identity.new_run_id()


def _run_rest(
    experiment: Experiment, run: Path, run_id: str, context: RankContext, lock: RunLock, observe: Observer
) -> None:
    """Run the rounds after the newest good checkpoint."""
    done = int(on_root(context.transport, lambda: continue_after(run, experiment, context.transport, run_id)))
    run_rounds(experiment, run, run_id, context, lock, done, observe)


def _create(run: Path, experiment: Experiment, transport: Transport, run_id: str, anew: bool) -> None:
    """Write what a new run begins with; a folder with another run is refused."""
    try:
        if run_identity.run_id(run) != run_id and (run_folder.rounds(run) or not anew):
            refuse_existing(run)
        (run / "shards").mkdir(exist_ok=True)
        run_folder.discard_after(run, None)
        stored_config.write(run, experiment, transport, run_id)
        metrics_file.restart(run, 0)
    except OSError as error:
        raise ConfigError(f"cannot write the run folder {run}: {error.strerror}; choose another --out") from error
