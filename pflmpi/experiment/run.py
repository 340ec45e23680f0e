"""Run a configuration in a folder, on all ranks: a new run, or the rest of one."""

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import pflmpi
from pflmpi import outside
from pflmpi.algorithms.base import CannotJoin
from pflmpi.atomic import explain_write_error
from pflmpi.config.load import Config
from pflmpi.config.sections import by_key
from pflmpi.data.dataset import describe_unscaled
from pflmpi.data.federation import Federation, resolve_split
from pflmpi.errors import ConfigError, RunError, Stopped
from pflmpi.experiment import build, privacy, stored_config
from pflmpi.experiment.build import Experiment, build_experiment, load_federation, try_outside_code
from pflmpi.experiment.restore import continue_after, on_recorded_data, restore
from pflmpi.experiment.run_weights import RunWeights
from pflmpi.learning.early_stop import EarlyStop
from pflmpi.machine import memory
from pflmpi.models import MODELS
from pflmpi.models.torch_module import ModuleArchitecture
from pflmpi.runtime import rounds
from pflmpi.runtime.checkpoints import Checkpoints
from pflmpi.runtime.client_state import Population, allocate, check_scratch, choose_state_folder, initialise
from pflmpi.runtime.config import OutputConfig
from pflmpi.runtime.contract import call_server_method
from pflmpi.runtime.exchange import check_server_memory
from pflmpi.runtime.faults import all_or_none, on_root
from pflmpi.runtime.progress import Observer
from pflmpi.runtime.round_report import RoundHooks
from pflmpi.runtime.round_schedule import RoundSchedule, advise_fewer_ranks, schedule
from pflmpi.runtime.setup import Setup
from pflmpi.runtime.stopping import Stop
from pflmpi.runtime.trackers import TrackedRun, check_trackers, tracked
from pflmpi.store import config_file, job_file, metrics_file, pruning, run_folder, verify
from pflmpi.store.job_file import End, Start
from pflmpi.store.layout import Layout
from pflmpi.store.names import SHARDS
from pflmpi.store.run_lock import RunLock, take
from pflmpi.store.runs import find_replaced_files, find_runs
from pflmpi.text import for_shell, join_truncated
from pflmpi.transports.base import Transport
from pflmpi.transports.peers import describe_ranks
from pflmpi.tree import Tree

Resume = Literal["never", "if_there", "always"]

_AHEAD = 20  # rounds that are scheduled in advance to find ranks without work
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankContext:
    """What a rank runs with: transport, device, and how the process was started."""

    transport: Transport
    device: torch.device  # on which this rank computes
    slots: int  # how many ranks can compute at once on all nodes
    gpu_models: tuple[str, ...] = ()  # of the ranks that compute; empty on CPUs
    stop: Stop = field(default_factory=Stop)  # collects reasons to stop
    jobs: Mapping[str, int] = field(default_factory=dict)  # restarts by job; see `store.run_lock.Owner`
    take_over: bool = False  # whether to take the run from a process that still writes it
    start: Start | None = None  # record of this start for jobs.txt
    announce: Callable[[], None] = lambda: None  # called on rank 0 once nothing can refuse the run any more


def run(
    config: Config,
    folder: Path,
    context: RankContext,
    observe: Observer,
    *,
    resume: Resume = "never",
    changed_code: bool = False,
    federation: Federation | None = None,
) -> Path:
    """Run a configuration to its last round in the folder that rank 0 names; return the folder.

    Args:
        config: the same on all ranks.
        observe: called on rank 0 after every round.
        resume: `never`: the folder must hold no run; `always`: resume from the newest good checkpoint in it, with the
            values of `config` that may change; `if_there`: resume, or start anew where there is no checkpoint yet.
        changed_code: resume even if code from outside the package has changed.
        federation: the clients' data, if already loaded.

    Raises:
        CollectiveError: on every rank, when it cannot start on one of them.
        Stopped: on every rank, after a complete round, when one of them was asked to stop.
    """
    transport = context.transport
    run = Path(on_root(transport, lambda: str(folder)))  # a name with the time may differ between ranks
    has_checkpoint = resume == "if_there" and on_root(transport, lambda: "yes" if run_folder.rounds(run) else "")
    resumes = resume == "always" or bool(has_checkpoint)
    if resumes:
        config = _resumed_config(run, config, transport, changed_code)
    experiment = _prepare(config, context, run if resumes else None, federation)
    with _locked(run, context, partial(_run_id, run) if resumes else config_file.new_run_id) as (lock, run_id):
        code = stored_config.resumed_code(run, experiment) if resumes else experiment.code
        recorded = stored_config.recorded(experiment, transport, run_id, code)
        if resumes:
            recorded |= stored_config.read_origin(run)
        if config.uplink.noise is not None:
            _record_privacy(recorded, experiment, transport)
        done = None
        if resumes:
            done = int(on_root(transport, lambda: continue_after(run, experiment, recorded)))
        else:
            create = partial(_create, run, experiment, recorded, anew=resume != "never")
            all_or_none(transport, lambda: create() if transport.rank == 0 else None)
        _run_rounds(experiment, run, recorded, context, lock, done, observe)
    return run


def _record_privacy(recorded: dict[str, Any], experiment: Experiment, transport: Transport) -> None:
    """Add the differential privacy of the messages to what the run records, and log it."""
    why_none = str(recorded.get("no_epsilon", "")) or privacy.why_unstated(experiment, "fork" in recorded)
    if why_none:
        recorded["no_epsilon"] = why_none  # of these rounds, so that a resume with other options has none either
    recorded["privacy"] = on_root(transport, lambda: privacy.statement(experiment, why_none))
    if transport.rank == 0:
        _log.warning("%s", recorded["privacy"])


def _resumed_config(run: Path, config: Config, transport: Transport, changed_code: bool) -> Config:
    """Returns the configuration to resume with; refuses or logs changed code from outside the package."""
    config = all_or_none(transport, lambda: stored_config.resume_config(run, config))
    for change in all_or_none(transport, lambda: stored_config.find_changed_code(run, config, changed_code)):
        _log.warning("%s; going on with the changed code", change)
    return config


def refuse_existing(run: Path, anew: bool = False) -> None:
    """Raise `ConfigError` for a folder that holds a run or runs, or files of such names, or that cannot be one.

    Args:
        anew: whether to allow the folder of a run that was stopped before its first checkpoint.
    """
    if run_folder.rounds(run):
        resume = f"`pflmpi resume {for_shell(run)}`"
        raise ConfigError(f"{run} holds a run already; continue it with {resume}, or choose another --out")
    is_begun = config_file.is_of_run(run) or (run / SHARDS).is_dir()  # by a run, or by a fork that was killed
    if replaced := [] if is_begun else [path.name for path in find_replaced_files(run)]:
        raise ConfigError(f"{run} holds {join_truncated(replaced)}, which a run would replace; choose another --out")
    if lost := verify.explain_lost_checkpoints(run):
        raise ConfigError(lost)
    if config_file.is_of_run(run) and not anew:
        raise ConfigError(f"{run} holds a run already; it has no checkpoint: add --continue, or choose another --out")
    if inner := [str(path.relative_to(run)) for path in find_runs(run) if path != run]:
        raise ConfigError(
            f"{run} is a folder of runs ({join_truncated(inner)}), which it would hide; choose another --out"
        )
    if outer := next((parent for parent in run.absolute().parents if config_file.is_of_run(parent)), None):
        raise ConfigError(f"{run} is in the run {outer}, which would hide it; choose another --out")
    if any(place.is_file() for place in (run, *run.parents)):
        raise ConfigError(f"cannot write the run folder {run}: Not a directory; choose another --out")


def _prepare(config: Config, context: RankContext, resumed: Path | None, federation: Federation | None) -> Experiment:
    """Prepares the experiment on all ranks; if a run is resumed, on the data that it was made with.

    Of a new run, rank 0 alone tries what is from outside, and tells all ranks which executor to use.
    """
    transport, is_root = context.transport, context.transport.rank == 0

    def built() -> Experiment:
        if is_root:
            if resumed is not None:
                stored_config.announce(resumed, [name for name, _ in config.output.named_trackers()])
            check_trackers(config.output)
        check_scratch(config.runtime)
        clients = federation or load_federation(config)
        experiment = build_experiment(config, clients, context.device, context.gpu_models)
        experiment.check_rounds(max(run_folder.rounds(resumed), default=0) if resumed is not None else 0)
        return experiment

    def completed() -> Experiment:
        if isinstance(experiment.newcomer, CannotJoin) and is_root:
            _log.warning("unseen clients are not tested: %s", experiment.newcomer.why)
        if resumed is not None:
            recorded = on_recorded_data(resumed, experiment)
            if recorded.division.unseen_numbers:
                recorded = recorded.with_run_weights()  # with which newcomers begin
            return replace(recorded, computed_on=stored_config.devices_so_far(resumed, recorded))
        weighted = experiment.with_run_weights()
        if is_root:
            _log_assumptions(weighted)
        return weighted

    with outside.as_config_error():
        experiment = all_or_none(transport, built)
        if resumed is None:
            executor = on_root(transport, partial(try_outside_code, experiment, config.runtime.executor))
            experiment = experiment.with_executor(executor)
        return all_or_none(transport, completed)


def _log_assumptions(experiment: Experiment) -> None:
    """Log what was assumed about the data and the models that the configuration does not say."""
    config, dataset = experiment.config, experiment.federation.dataset
    first, like = experiment.tasks[0].first, experiment.tasks[0].like()
    if isinstance(first, RunWeights) and (drawn := first.drawn(like)):
        _log.warning("%s: its server keeps no %s; the server's is drawn", first.name, join_truncated(drawn))
    if isinstance(first, RunWeights) and (others := first.differing(dataset.digest, experiment.division.digest)):
        _log.warning(
            "%s: its %s differs: its models may have been trained on samples that are tested here, and %s go by their "
            "numbers",
            first.name,
            others,
            "clients, classes and characters" if dataset.characters else "clients and classes",
        )
    if isinstance(first, RunWeights) and (settings := first.trained_with(config, experiment.code)):
        trained_with = ", ".join(settings)
        _log.warning("%s: its models were trained with %s; they may score otherwise here", first.name, trained_with)
    if config.data.label is None and dataset.label_columns:
        _log.warning("the label is the column %r; data.label names another", dataset.label_columns[0])
    for architecture in (task.architecture for task in experiment.tasks):
        if isinstance(architecture, ModuleArchitecture) and architecture.draws_head:
            name, head = architecture.name, architecture.recipe.head
            _log.warning("model %s: its head %s is made anew for %d classes", name, head, architecture.num_classes)
    chosen = config.data.split == "auto" and config.partition.path is None
    if chosen and resolve_split(config.data, dataset) == "official":
        marked = int(dataset.official_test.sum())
        _log.warning("tests on the %d samples that the data marks as test (data.split: auto)", marked)
    if dataset.official_validation is not None and experiment.federation.validation:
        _log.warning("validates on the %d samples that the data marks so", experiment.federation.num_validation.sum())
    own_model = any(MODELS.reference(MODELS.name_of(type(model))) for model in config.models)
    tokens = own_model and dataset.may_be_tokens and not dataset.columns  # columns of a table are rarely tokens
    if config.data.normalize == "fixed" and not tokens and (problem := describe_unscaled(dataset)):
        _log.warning("%s", problem)


@contextlib.contextmanager
def _locked(run: Path, context: RankContext, id_of_run: Callable[[], str]) -> Iterator[tuple[RunLock, str]]:
    """Hold the lock of a run on rank 0; yields it and the id of the run on every rank."""
    locks: list[RunLock] = []
    before = time.process_time()
    cpu_seconds: float | None = None

    def locked() -> str:
        locks.append(lock := take(run, context.jobs, context.take_over))
        with explain_write_error(f"the run folder {run}", "choose another folder"):
            start = context.start and replace(context.start, token=lock.token, folder=run.stat().st_ino)
            job_file.record(run, context.jobs, start)
        return f"{lock.token} {id_of_run()}"

    try:
        token, _, run_id = on_root(context.transport, locked).partition(" ")
        lock = locks[0] if locks else RunLock(run, token)
        context.stop.at_once = lock.drop
        stopped = None
        try:
            yield lock, run_id
        except Stopped as reason:  # on all ranks
            stopped = reason
        cpu_seconds = _sum_of_ranks(context.transport, time.process_time() - before)
        if stopped is not None:
            raise stopped
    finally:
        for lock in locks:
            with contextlib.suppress(OSError):  # a full disk or a missing folder, which has already ended the run
                job_file.record(run, context.jobs, End(lock.token, time.time(), cpu_seconds))
            lock.release()


def _sum_of_ranks(transport: Transport, value: float) -> float | None:
    """Sums a number over the ranks; None except on rank 0."""
    parts = transport.gather(np.array([value]).view(np.uint8), [8] * transport.size)
    return None if parts is None else float(np.concatenate(parts).view(np.float64).sum())


def _run_id(run: Path) -> str:
    return config_file.run_id(run) or config_file.new_run_id()


def _create(run: Path, experiment: Experiment, recorded: Mapping[str, Any], anew: bool) -> None:
    """Write the files that a new run starts with; raises as `refuse_existing`."""
    with explain_write_error(f"the run folder {run}", "choose another --out"):
        if config_file.run_id(run) != recorded["run"]:
            refuse_existing(run, anew)
        (run / SHARDS).mkdir(exist_ok=True)
        pruning.discard_after(run, None)
        stored_config.write(run, experiment, recorded)
        metrics_file.restart(run, 0, experiment.columns)


def _run_rounds(
    experiment: Experiment,
    run: Path,
    recorded: Mapping[str, Any],
    context: RankContext,
    lock: RunLock,
    done: int | None,
    observe: Observer,
) -> None:
    """Run the rounds after `done`, or all rounds of a new run if it is None."""
    transport, config = context.transport, experiment.config
    transport.take_moved()
    setup = build.setup(experiment, transport.size, context.slots, transport.rank)
    check_same_setup(experiment, setup, transport)
    population = _allocated(setup, experiment, run, transport, done)
    if done is None:
        server, layout = _initial_state(setup, population, transport)
    else:
        server, layout = restore(run, setup, population, transport, done, experiment.columns)
    attributes: Mapping[str, str | int] = {"run": recorded["run"]}  # what a shard has of them
    if transport.rank == 0:
        attributes = stored_config.attributes(experiment, recorded)
        context.announce()
    checkpoints = Checkpoints(run, setup, transport, attributes, layout, lock, config.checkpoint.keep)
    output = config.output if transport.rank == 0 else OutputConfig()
    tracked_run = TrackedRun(run, recorded["run"], by_key(config.resolved()), transport.size, checkpoints.written)
    try:
        with tracked(tracked_run, output, observe) as observer:
            if not _has_ended(run, config, context):
                scheduled = schedule(setup, config.evaluation, config.checkpoint, done)
                hooks = RoundHooks(setup, transport, checkpoints, observer, context.stop, config.runtime.timeout)
                skips = config.runtime.client_errors == "skip"
                rounds.run(setup, transport, scheduled, hooks, checkpoints, server, population, skips)
    except Stopped:
        raise
    except BaseException:
        checkpoints.close()
        raise


def _allocated(setup: Setup, experiment: Experiment, run: Path, transport: Transport, done: int | None) -> Population:
    """Allocates the state of the clients of this rank; rank 0 first checks memory and work in the rounds ahead."""
    config, ahead = experiment.config, list[RoundSchedule]()
    if transport.rank == 0:
        ahead = list(islice(schedule(setup, config.evaluation, config.checkpoint, done), _AHEAD))
        if advice := advise_fewer_ranks(setup, ahead[1:]):
            _log.warning("%s", advice)

    def allocated() -> Population:
        check_server_memory(setup, ahead, memory().free)
        hosted = setup.placement.hosted(transport.rank)
        return allocate(experiment.cohort, hosted, setup.templates, choose_state_folder(config.runtime, run))

    return all_or_none(transport, allocated)


def _has_ended(run: Path, config: Config, context: RankContext) -> bool:
    """Whether the run has already stopped early, according to its metrics so far; collective."""
    if config.training.stop is None:
        return False

    def has_stopped() -> str:
        context.stop.early = early = EarlyStop(config.training.stop, lines := metrics_file.read(run))
        if early.met and (done := int(lines[-1]["round"])) < config.training.rounds:
            print(
                f"pflmpi: nothing is left to do: {run} has stopped early after round {done}: {early.why}; "
                f"`pflmpi resume {for_shell(run)} -s training.stop=null` goes on to round {config.training.rounds}",
                flush=True,
            )
        return "yes" if early.met else ""

    return bool(on_root(context.transport, has_stopped))


def _initial_state(setup: Setup, population: Population, transport: Transport) -> tuple[Tree, Layout]:
    """Make the state before the first round; return the server's (`{}` except on rank 0) and the empty layout."""
    algorithm = setup.algorithm
    server: Tree = {}
    initialise(population, algorithm, setup.executor.tasks)
    if transport.rank == 0:
        server = call_server_method(algorithm, "init_server", 0, {}, setup.task)
    return server, Layout.unwritten(setup.executor.cohort)


def check_same_setup(experiment: Experiment, setup: Setup, transport: Transport) -> None:
    """Compare the setup of all ranks, whose collective calls would not match otherwise.

    Raises:
        CollectiveError: on all ranks, naming those that differ from rank 0, and in what.
    """
    texts = transport.gather_texts(json.dumps(_hashes(experiment, setup)))

    def compare() -> str:
        first, *others = map(json.loads, texts or ())
        for part, value in first.items():
            if ranks := [rank for rank, hashes in enumerate(others, start=1) if hashes.get(part) != value]:
                raise RunError(
                    f"{describe_ranks(ranks, transport.peers)}: {part} is not rank 0's; use one environment, one "
                    "configuration and the same data on all hosts (`pflmpi doctor`, started in the same way, compares "
                    "them)"
                )
        return ""

    on_root(transport, compare)


def _hashes(experiment: Experiment, setup: Setup) -> dict[str, str]:
    """Returns hashes that must be equal on all ranks, by the names used in errors; causes come first."""
    placement, config = setup.placement, experiment.config
    homes = b"" if placement.home is None else placement.home.tobytes()
    groups = b"".join(group.astype(np.int64).tobytes() for group in placement.groups)
    return {
        "the version": f"{pflmpi.__version__} {torch.__version__}",
        "the configuration": _hash(repr(config.resolved()).encode()),
        "the code from outside the package": _hash(repr(dict(experiment.code)).encode()),
        "the frozen weights": experiment.frozen_digest or "none",
        "the data": experiment.division.everyone.dataset.digest,
        "the partition": experiment.division.digest,
        "the placement of clients": _hash(repr(placement.computing_ranks).encode() + homes + groups),
    }


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
