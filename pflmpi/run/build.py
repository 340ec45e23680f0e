"""Names become objects: from a validated configuration to a run that goes."""

import dataclasses
import warnings
from dataclasses import dataclass

import numpy as np
import torch

from pflmpi import tree
from pflmpi.config.load import Config
from pflmpi.data import load
from pflmpi.data.dataset import Dataset
from pflmpi.data.federation import Federation, build
from pflmpi.errors import ConfigError
from pflmpi.learning.task import HOST, Task
from pflmpi.messages.declared import Declared
from pflmpi.messages.kinds import ClassMeans, Downlink, OwnClasses, Shared, Uplink, with_rows
from pflmpi.models.base import Architecture
from pflmpi.runtime.batches import Pool
from pflmpi.runtime.client_state import RECEIVED
from pflmpi.runtime.contract import check_declarations
from pflmpi.runtime.lanes import Lanes
from pflmpi.runtime.loop import Loop
from pflmpi.runtime.padding_check import check_padding
from pflmpi.runtime.placement import Placement, choose_hosts, cut_groups, place_clients
from pflmpi.runtime.setup import Setup
from pflmpi.transports.detect import Launch
from pflmpi.tree import Tree

_LANES = 32
_PLANNED_ROUNDS = 1000  # placement looks this far ahead


@dataclass(frozen=True)
class Experiment:
    """The objects that a configuration names, the same on every rank.

    Attributes:
        config: the configuration, with `executor` and `lanes` decided.
        federation: who holds what.
        architectures: one per cohort.
        cohort: [N] the cohort of each client.
        tasks: one per cohort, on the device of this rank.
    """

    config: Config
    federation: Federation
    architectures: tuple[Architecture, ...]
    cohort: np.ndarray
    tasks: tuple[Task, ...]


def load_federation(config: Config) -> Federation:
    """Return the clients' data as configured."""
    return build(load(config.data, config.seed), config.partition, config.data, config.seed)


def prepare(config: Config, device: torch.device) -> Experiment:
    """Return the experiment of a configuration; all that can be refused before the start is refused here."""
    return assemble(config, load_federation(config), device)


def assemble(config: Config, federation: Federation, device: torch.device) -> Experiment:
    """Return the experiment of a configuration on data that is loaded already."""
    dataset, n = federation.dataset, federation.num_clients
    bound = [model.bind(dataset.images.shape[1:], dataset.num_classes) for model in config.models]
    cycled = [bound[client % len(bound)] for client in range(n)]
    architectures = tuple(dict.fromkeys(cycled))
    cohort = np.array([architectures.index(architecture) for architecture in cycled], np.int64)
    tasks = tuple(
        Task(architecture, config.training, n, config.seed, dataset.mean, dataset.std, device)
        for architecture in architectures
    )
    check_declarations(config.algorithm, tasks[0])
    _check_messages(config, tasks)
    participants = len(config.training.participants(config.seed, 1, n))
    config.algorithm.check(tasks[0], participants)
    decided = _decide(config, federation, tasks)
    if decided.runtime.executor == "lanes":
        for number, task in enumerate(tasks):
            check_padding(config.algorithm, task.replace(device=HOST), int(np.flatnonzero(cohort == number)[0]))
    return Experiment(decided, federation, architectures, cohort, tasks)


def setup(experiment: Experiment, launch: Launch, slots: int) -> Setup:
    """Return what this rank needs for the rounds.

    Args:
        experiment: from `prepare`.
        launch: who this rank is.
        slots: how many ranks of a node can compute at once (its cores or GPUs).
    """
    config, federation = experiment.config, experiment.federation
    algorithm, tasks = config.algorithm, experiment.tasks
    task = tasks[0].replace(device=HOST)
    declared = Declared(
        dict(algorithm.uplink(task)), dict(algorithm.downlink(task)), federation.class_counts > 0, federation.num_train
    )
    executor, lanes = config.runtime.executor, config.runtime.lanes
    assert executor != "auto" and lanes is not None
    clients = (Lanes if executor == "lanes" else Loop)(
        algorithm,
        tasks,
        experiment.cohort,
        federation,
        _pool(federation.dataset, tasks[0].device),
        config.evaluation.batch_size,
    )
    return Setup(
        executor=clients,
        placement=_plan(experiment, launch, slots, federation.num_test),
        declared=declared,
        evaluation=config.evaluation,
        checkpoint=config.checkpoint,
        timeout=config.runtime.timeout,
    )


def kept_reply(config: Config) -> tuple[str, ...]:
    """Return the messages that a client keeps to be tested with while it is absent."""
    return config.algorithm.predicts_with if config.evaluation.absent == "last_received" else ()


def client_templates(experiment: Experiment) -> list[Tree]:
    """Return what a client keeps between rounds, for each cohort, as a template."""
    algorithm, kept = experiment.config.algorithm, kept_reply(experiment.config)
    templates = []
    for number, task in enumerate(experiment.tasks):
        first = int(np.flatnonzero(experiment.cohort == number)[0])
        host = task.replace(device=HOST)
        template = tree.like(algorithm.init_client(host, first))
        if kept:
            kinds = algorithm.downlink(host)
            classes = task.num_classes
            template[RECEIVED] = {name: _received_like(kinds[name], classes) for name in kept}
        templates.append(template)
    return templates


def _received_like(kind: Downlink, classes: int) -> Tree:
    if isinstance(kind, OwnClasses):
        return with_rows(kind.like, classes)
    return kind.like


def _plan(experiment: Experiment, launch: Launch, slots: int, num_test: np.ndarray) -> Placement:
    config, n = experiment.config, experiment.federation.num_clients
    training = config.training
    steps = _steps(experiment.config, experiment.federation)
    groups = cut_groups(experiment.cohort, steps, config.runtime.lanes or 1)
    hosts = choose_hosts(config.runtime.server, launch.size, n, slots)
    # A step costs about three forward passes: forward, and twice as much backward.
    work = 3.0 * steps * training.batch_size
    floating = not any(template for template in client_templates(experiment)) and all(
        type(kind) is Shared for kind in config.algorithm.downlink(experiment.tasks[0]).values()
    )
    home = None
    if not floating:
        rounds = min(max(training.rounds, 1), _PLANNED_ROUNDS)
        load = np.zeros((rounds, n))
        for round in range(rounds):
            chosen = training.participants(config.seed, round + 1, n)
            load[round, chosen] = work[chosen] + num_test[chosen]
        if config.algorithm.predicts_with:
            load += num_test
        home = place_clients(groups, load, hosts)
    return Placement(launch.size, groups, home, hosts, work)


def _steps(config: Config, federation: Federation) -> np.ndarray:
    return np.array([config.training.num_steps(int(samples)) for samples in federation.num_train], np.int64)


def _pool(dataset: Dataset, device: torch.device) -> Pool:
    with warnings.catch_warnings():  # the map is read-only; nothing here writes to it
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        images = torch.from_numpy(dataset.images)
    return Pool(images.to(device), torch.from_numpy(dataset.labels.copy()).to(device))


def _decide(config: Config, federation: Federation, tasks: tuple[Task, ...]) -> Config:
    """Return the configuration with `executor` and `lanes` decided, from what does not depend on ranks."""
    runtime, architectures = config.runtime, [task.architecture for task in tasks]
    batch_norm = any(architecture.has_batch_norm for architecture in architectures)
    if runtime.executor == "lanes" and batch_norm:
        raise ConfigError(
            "runtime.executor = 'lanes': batch norm updates its statistics in place, which cannot be batched "
            "over clients; use loop or auto"
        )
    executor = runtime.executor
    if executor == "auto":
        on_gpu = tasks[0].device.type == "cuda"
        # On a CPU a batched convolution is slower than one after another; a matrix product is faster.
        batchable = not batch_norm and (on_gpu or not any(a.has_convolution for a in architectures))
        executor = "lanes" if batchable else "loop"
    n = federation.num_clients
    lanes = runtime.lanes or -(-n // max(2, -(-n // _LANES)))  # two groups at least, so that two ranks can share
    lanes = 1 if executor == "loop" else lanes
    return dataclasses.replace(config, runtime=runtime.model_copy(update={"executor": executor, "lanes": lanes}))


def _check_messages(config: Config, tasks: tuple[Task, ...]) -> None:
    """Refuse unlike models where the algorithm cannot have them, or where a message would differ in shape."""
    if len(tasks) == 1:
        return
    if not config.algorithm.unlike_models:
        raise ConfigError(
            f"{type(config.algorithm).__name__} sends whole models or bodies and needs one architecture; "
            f"the configuration has {len(tasks)}: {', '.join(str(task.architecture.name) for task in tasks)}"
        )
    first = tasks[0]
    for task in tasks[1:]:
        for way in ("uplink", "downlink"):
            mine, theirs = getattr(config.algorithm, way)(first), getattr(config.algorithm, way)(task)
            for name in mine:
                if _shape(mine[name]) != _shape(theirs[name]):
                    raise ConfigError(
                        f"the {way} message {name!r} has shape {_shape(mine[name])} with {first.architecture.name} and "
                        f"{_shape(theirs[name])} with {task.architecture.name}; "
                        "choose models with the same number of features"
                    )


def _shape(kind: Uplink | Downlink) -> object:
    if isinstance(kind, ClassMeans):
        return [kind.num_features]
    return {path: list(leaf.shape) for path, leaf in tree.leaves(kind.like)}
