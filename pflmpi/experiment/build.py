"""From a validated configuration to the objects that its rounds need."""

import dataclasses
import hashlib
import logging
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch

from pflmpi import outside
from pflmpi.algorithms.base import CannotJoin, Newcomer
from pflmpi.config.load import Config
from pflmpi.data import load
from pflmpi.data.dataset import Dataset
from pflmpi.data.federation import Federation, build
from pflmpi.data.unseen import Division, divide, trained_on
from pflmpi.errors import ConfigError
from pflmpi.experiment import training_checks as checks
from pflmpi.experiment.module_check import check_modules
from pflmpi.experiment.outside_code import code_hashes
from pflmpi.experiment.padding_check import check_padding, unsuited_to_lanes
from pflmpi.experiment.run_weights import run_weights
from pflmpi.learning.measures import Measure, measures_of
from pflmpi.learning.participation import Participation
from pflmpi.learning.task import HOST, SERVER, Task
from pflmpi.learning.transforms import Transform, transform_of
from pflmpi.messages.declared import Declared
from pflmpi.models.base import Model
from pflmpi.models.frozen import Frozen, frozen_paths, matching, parameter_names
from pflmpi.models.torch_module import ModuleArchitecture, ModuleModel
from pflmpi.rng import stream
from pflmpi.runtime.client_state import client_templates
from pflmpi.runtime.config import RuntimeConfig
from pflmpi.runtime.contract import IN_LANES, check_cohorts, check_declarations, check_heads, check_parts
from pflmpi.runtime.devices import choose_executor
from pflmpi.runtime.executors.base import Executor, Loop
from pflmpi.runtime.executors.batches import Pool
from pflmpi.runtime.executors.lanes import Lanes
from pflmpi.runtime.executors.transfers import device_memory
from pflmpi.runtime.placement import Placement, place
from pflmpi.runtime.progress import metric_columns
from pflmpi.runtime.setup import Setup
from pflmpi.runtime.unseen import Unseen, unseen_setup
from pflmpi.store.partition_file import SampleCounts
from pflmpi.tree import Tree

E = TypeVar("E", bound=Executor)
_MOST_RESIDENT = 0.5  # of a GPU's memory
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Experiment:
    """Data, models and algorithm of a configuration; the same on every rank and for any number of ranks."""

    config: Config  # the configuration, with `executor` and `lanes` decided
    division: Division  # who holds what, and who is trained
    cohort: np.ndarray  # [N] the cohort of each client; a cohort has one architecture
    tasks: tuple[Task, ...]  # one per cohort, on the device of this rank
    templates: tuple[Tree, ...]  # one per cohort, what a client keeps between rounds
    computed_on: tuple[str, ...]  # the models of the GPUs that compute it, or the processor's architecture
    on_gpu: bool  # whether GPUs compute it, wherever this rank is
    transform: Transform | None = None  # what training samples go through

    @property
    def federation(self) -> Federation:
        """Data of the clients that are trained."""
        return self.division.trained

    @cached_property
    def newcomer(self) -> Newcomer | CannotJoin | None:
        """Rule by which unseen clients join; None if there are none."""
        if not self.division.unseen_numbers:
            return None
        return self.config.algorithm.newcomer(self.tasks[0].replace(device=HOST))

    @cached_property
    def measures(self) -> dict[str, Measure]:
        """What is measured besides what a task of classes always has."""
        task_kind, measures = self.federation.dataset.task_kind, measures_of(self.config.evaluation.measures or ())
        return {name: measure for name, measure in measures.items() if name != "accuracy" or not task_kind.classes}

    @property
    def columns(self) -> list[str]:
        """Those of metrics.csv."""
        simulated = self.config.training.step_seconds is not None
        return metric_columns([*self.measures], simulated, bool(self.federation.validation))

    @cached_property
    def pool(self) -> Pool:
        """All samples, or their features, on the device of this rank: one copy for all that computes with them."""
        dataset, device = self.federation.dataset, self.tasks[0].device
        if self.caches_features:
            return Pool.of_features(dataset, self.tasks[0])
        if device.type != "cpu" and dataset.images.nbytes > self.most_resident(device_memory(device)):
            return dataclasses.replace(Pool.of(dataset, HOST), goes_to=device)
        return Pool.of(dataset, device)

    def most_resident(self, memory: float) -> float:
        """Bytes of samples that a GPU with so much memory holds; more stay on the host, see `Pool.on_device`."""
        return {"host": 0.0, "auto": memory * _MOST_RESIDENT, "device": math.inf}[self.config.data.resident]

    @property
    def caches_features(self) -> bool:
        """Whether clients train on features of a frozen body that are computed before."""
        return self.config.models[0].cache_features

    @property
    def num_participants(self) -> int:
        """Clients that are drawn in each round."""
        return self.config.training.num_drawn(self.federation.num_clients)

    def with_executor(self, runtime: RuntimeConfig) -> "Experiment":
        """The experiment with these settings, and `executor` and `lanes` decided."""
        clients, participants = self.federation.num_clients, self.num_participants
        runtime = choose_executor(runtime, self.tasks, clients, participants, self.on_gpu)
        return dataclasses.replace(self, config=dataclasses.replace(self.config, runtime=runtime))

    def with_run_weights(self) -> "Experiment":
        """The experiment whose models begin as `model.weights` says; what cannot be so is refused."""
        first = run_weights(self.config, self.federation.num_clients)
        if first is None:
            return self
        for cohort, task in enumerate(self.tasks):
            first.check(task, int(np.flatnonzero(self.cohort == cohort)[0]))
        return dataclasses.replace(self, tasks=tuple(task.replace(first=first) for task in self.tasks))

    def check_participation(self, done: int) -> None:
        """Raise `ConfigError` where a round after `done` cannot be with the clients that take part."""
        participation = Participation(self.config.training, self.config.seed, self.federation.num_train)
        checks.check_participation(self.config, self.tasks[0], participation, done)

    @property
    def counts(self) -> SampleCounts:
        """Samples of each client and class."""
        validation = self.federation.for_validation
        totals = None if validation is None else validation.test_class_counts
        return SampleCounts(self.federation.class_counts, self.federation.test_class_counts, totals)

    @property
    def weights(self) -> list[str]:
        """Files that the models start from."""
        recipes = [task.architecture.recipe for task in self.tasks if isinstance(task.architecture, ModuleArchitecture)]
        return [recipe.weights for recipe in recipes if recipe.weights is not None]

    @property
    def frozen_digest(self) -> str:
        """SHA-256 (hex) of all frozen weights; "" if there are none."""
        digests = [task.frozen.digest for task in self.tasks if task.frozen.digest]
        return hashlib.sha256(" ".join(digests).encode()).hexdigest() if digests else ""

    @cached_property
    def code(self) -> dict[str, str]:
        """SHA-256 of the code from outside the package; see `experiment.outside_code`."""
        return code_hashes(self.config)


def load_federation(config: Config) -> Federation:
    """The clients' data as configured."""
    return build(load(config.data, config.seed, config.runtime.cache), config.partition, config.data, config.seed)


def prepare(
    config: Config, device: torch.device, gpu_models: Sequence[str] = (), federation: Federation | None = None
) -> Experiment:
    """The experiment of a configuration; all that can be refused before the start is refused here.

    Args:
        gpu_models: of the ranks that compute; none on CPUs.
        federation: the clients' data, if they are loaded already.
    """
    with outside.as_config_error():
        experiment = draft(config, federation or load_federation(config), device, gpu_models)
        experiment = complete(experiment, config.runtime, check_executor(experiment, config.runtime.executor))
        experiment.check_participation(0)
        return experiment.with_run_weights()


def draft(config: Config, federation: Federation, device: torch.device, gpu_models: Sequence[str] = ()) -> Experiment:
    """The models, bound to data that is already loaded, and who has which; see `prepare`.

    The executor is the one that the models suggest, and nothing is known yet of what clients keep.
    """
    if config.evaluation.unseen and config.data.normalize == "pixel":
        raise ConfigError(
            f"evaluation.unseen = {config.evaluation.unseen} with data.normalize = pixel, which computes with the "
            "samples of all clients; choose standard, which leaves unseen ones out"
        )
    division = divide(federation, config.evaluation.unseen, stream(config.seed, 0, -1, "unseen"))
    dataset = trained_on(division) if config.data.normalize == "standard" else federation.dataset
    n = division.trained.num_clients
    bound = [_task(model, config, dataset, n, device) for model in config.models][:n]
    tasks = tuple(dict.fromkeys(bound))
    cohort = np.resize([tasks.index(task) for task in bound], n)
    transform = transform_of(config.data.transform, torch.tensor(dataset.images[:2]))
    computed_on = tuple(gpu_models) or (platform.machine(),)
    experiment = Experiment(config, division, cohort, tasks, (), computed_on, bool(gpu_models), transform)
    return experiment.with_executor(config.runtime)


def _task(model: Model, config: Config, dataset: Dataset, num_clients: int, device: torch.device) -> Task:
    """The task of the clients that have a model; what of it is frozen is on the device from now on."""
    shape, num_classes = dataset.images.shape[1:], dataset.num_classes
    if isinstance(model, ModuleModel) and dataset.may_be_tokens and config.data.normalize == "fixed":
        # Made-up samples would have padding alone.
        architecture = model.bind(shape, num_classes, torch.tensor(dataset.images[:2]))
    else:
        architecture = model.bind(shape, num_classes)
    task = Task(architecture, config.training, num_clients, config.seed, dataset.mean, dataset.std, device)
    task = task.replace(kind=dataset.task_kind, label_shape=dataset.labels.shape[1:])
    _check_axes(task)
    if not (architecture.frozen or model.trainable is not None or model.personal is not None):
        return task
    head = architecture.recipe.head if isinstance(architecture, ModuleArchitecture) else None
    names = parameter_names(task.like(), head)
    if paths := frozen_paths(model, architecture, names):
        frozen = Frozen.of(architecture.init(stream(config.seed, 0, SERVER, "init")), (*paths, *architecture.constants))
        frozen.on(device)
        task = task.replace(frozen=frozen)
    trained = {path: name for path, name in names.items() if path not in paths}
    personal = () if model.personal is None else matching("model.personal", model.personal, trained, architecture.name)
    return task.replace(personal=personal)


def _check_axes(task: Task) -> None:
    """Raise `ConfigError` for a model with scores of other axes than the labels of the task need."""
    architecture, needed = task.architecture, task.score_shape[:-1]
    axes = architecture.findings.axes if isinstance(architecture, ModuleArchitecture) else ()
    if axes != needed:
        scores, allowed = (", ".join(["B", *map(str, some), "K"]) for some in (axes, needed))
        raise ConfigError(
            f"model {architecture.name} has scores [{scores}], and labels of this data.task need [{allowed}]; choose a "
            "model that has them, such as a module of your own"
        )


def check_executor(experiment: Experiment, configured: str) -> str:
    """The executor, once modules from outside have been compared with plain PyTorch, and an algorithm tried in lanes.

    Args:
        experiment: from `draft`.
        configured: `runtime.executor` of the configuration.

    Raises:
        ConfigError: one is not trained as PyTorch trains it, or not in lanes where those are configured.
    """
    executor = experiment.config.runtime.executor
    in_lanes = executor == "lanes"
    why = check_modules(experiment.tasks, experiment.cohort, experiment.federation, in_lanes)
    if not why and in_lanes and configured == "auto":
        why = unsuited_to_lanes(experiment.config.algorithm, experiment.tasks, experiment.cohort)
    if not why:
        return executor
    if configured == "lanes":
        raise ConfigError(f"{why}{IN_LANES}")
    _log.warning("clients are computed one after the other (runtime.executor: loop): %s", why)
    return "loop"


def complete(experiment: Experiment, runtime: RuntimeConfig, executor: str) -> Experiment:
    """The experiment of a draft; see `prepare`.

    Args:
        executor: from `check_executor`, the same on all ranks.
    """
    if executor != experiment.config.runtime.executor:
        experiment = experiment.with_executor(runtime.model_copy(update={"executor": executor}))
    config, cohort, tasks = experiment.config, experiment.cohort, experiment.tasks
    algorithm, training = config.algorithm, config.training
    checks.check_kind(algorithm, tasks[0])
    check_parts(algorithm, tasks)
    if any(model.cache_features for model in config.models):
        checks.check_cached_features(config, tasks[0], experiment.transform, experiment.federation.dataset.images[:2])
    check_declarations(algorithm, tasks[0])
    check_cohorts(algorithm, tasks)
    check_heads(algorithm, tasks)
    checks.check_options(algorithm, tasks[0])
    checks.check_uplink(config.uplink, algorithm, tasks[0])
    checks.check_measures(experiment.measures, tasks[0])
    algorithm.check(tasks[0], experiment.num_participants)
    checks.check_passes(training, algorithm.passes(tasks[0], 1), experiment.division.everyone.num_train)
    if config.runtime.executor == "lanes":
        for number, task in enumerate(tasks):
            check_padding(algorithm, task, int(np.flatnonzero(cohort == number)[0]))
    kept_reply = algorithm.predicts_with if config.evaluation.absent == "last_received" else ()
    templates = client_templates(algorithm, tasks, cohort, kept_reply, config.uplink)
    experiment = dataclasses.replace(experiment, templates=templates)

    def trial() -> checks.OneStep:
        of_one = dataclasses.replace(experiment, division=checks.only_largest_client(experiment.division))
        return executor_of(of_one, checks.OneStep)

    checks.check_optimizer(training, trial)
    if training.stop is not None:
        checks.check_stop(training.stop, config.evaluation, trial())
    return experiment


def setup(experiment: Experiment, ranks: int, slots: int, rank: int | None = None) -> Setup:
    """Setup of the rounds of an experiment on some ranks.

    Args:
        experiment: from `prepare`.
        slots: how many of them can compute at once (cores or GPUs).
        rank: this one, whose GPU then has the samples of its own clients alone; None: any client may be computed.
    """
    config, federation, device = experiment.config, experiment.federation, experiment.tasks[0].device
    algorithm, task, runtime = config.algorithm, experiment.tasks[0].replace(device=HOST), config.runtime
    executor = executor_of(
        experiment, Lanes if runtime.executor == "lanes" else Loop, Pool.of(federation.dataset, HOST)
    )
    up, down = dict(algorithm.uplink(task)), dict(algorithm.downlink(task))
    declared = Declared(up, down, federation.class_counts > 0, federation.num_train, config.uplink)
    placement = place(executor, declared, experiment.templates, runtime, ranks, slots)
    ready = Setup(
        executor=executor,
        placement=placement,
        declared=declared,
        templates=experiment.templates,
        unseen=_unseen(experiment, executor, declared, placement),
    )
    on_host = device.type == "cpu" and not experiment.caches_features  # where ranks share a mapped file
    if rank is None or on_host or (samples := ready.samples(rank)) is None:
        return ready.with_pool(experiment.pool)
    if experiment.caches_features:
        return ready.with_pool(Pool.of_features(federation.dataset, experiment.tasks[0], samples))
    if len(samples) * federation.dataset.images[:1].nbytes > experiment.most_resident(device_memory(device)):
        return ready.with_pool(experiment.pool)
    return ready.with_pool(Pool.of_some(federation.dataset, device, samples))


def _unseen(experiment: Experiment, executor: Executor, declared: Declared, placement: Placement) -> Unseen | None:
    """Setup of the tests of unseen clients, if there are any that can join; they have the models in turn too."""
    if not isinstance(experiment.newcomer, Newcomer):
        return None
    evaluation, everyone, cohort = experiment.config.evaluation, experiment.division.everyone, experiment.cohort
    cohort = np.concatenate([cohort, np.resize(cohort, everyone.num_clients - len(cohort))])
    whole = dataclasses.replace(executor, federation=everyone, cohort=cohort)
    lanes = experiment.config.runtime.lanes or 1
    return unseen_setup(whole, declared.published, placement, lanes, experiment.newcomer, evaluation.unseen_updates)


def executor_of(experiment: Experiment, kind: Callable[..., E], pool: Pool | None = None) -> E:
    """Executor of an experiment, with all samples on its device unless a pool is given."""
    config, federation, pool = experiment.config, experiment.federation, pool or experiment.pool
    batch, transform = config.evaluation.batch_size, experiment.transform
    tasks = experiment.tasks
    if experiment.caches_features:
        tasks = tuple(task.replace(cached_features=True) for task in tasks)
    first_test = min(config.evaluation.every, config.training.rounds)
    return kind(
        config.algorithm, tasks, experiment.cohort, federation, pool, batch, transform, experiment.measures, first_test
    )
