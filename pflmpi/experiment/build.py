"""Builds the objects that the rounds of a configuration need."""

import dataclasses
import hashlib
import logging
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

import numpy as np
import torch

from pflmpi import outside
from pflmpi.algorithms.base import CannotJoin, Newcomer
from pflmpi.config.load import Config
from pflmpi.data import load
from pflmpi.data.dataset import Dataset
from pflmpi.data.federation import Federation, build
from pflmpi.data.unseen import Division, hold_out_clients, standardise_on_trained
from pflmpi.errors import ConfigError
from pflmpi.experiment import training_checks as checks
from pflmpi.experiment.module_check import check_modules
from pflmpi.experiment.outside_code import code_hashes
from pflmpi.experiment.padding_check import find_lane_problem
from pflmpi.experiment.run_weights import run_weights
from pflmpi.experiment.trial_update import (
    OneStep,
    check_prediction,
    check_repeats,
    only_largest_client,
)
from pflmpi.learning.measures import Measure, load_measures
from pflmpi.learning.participation import Participation
from pflmpi.learning.task import HOST, SERVER, Task
from pflmpi.learning.transforms import Transform, check_draws, load_transform
from pflmpi.messages.declared import Declared
from pflmpi.models.base import Model
from pflmpi.models.frozen import Frozen, find_frozen_paths, match_parameters, parameter_names
from pflmpi.models.torch_module import ModuleArchitecture, ModuleModel
from pflmpi.rng import stream
from pflmpi.runtime.client_state import client_templates
from pflmpi.runtime.contract import IN_LANES, check_cohorts, check_declarations, check_heads, check_parts
from pflmpi.runtime.devices import choose_executor
from pflmpi.runtime.executors.base import Executor, Loop
from pflmpi.runtime.executors.batches import Pool
from pflmpi.runtime.executors.lanes import Lanes
from pflmpi.runtime.executors.transfers import device_memory
from pflmpi.runtime.placement import Placement, make_placement
from pflmpi.runtime.progress import metric_columns
from pflmpi.runtime.setup import Setup
from pflmpi.runtime.unseen import Unseen, unseen_setup
from pflmpi.store.partition_file import SampleCounts
from pflmpi.text import first_line
from pflmpi.tree import Tree

E = TypeVar("E", bound=Executor)
_MOST_RESIDENT = 0.5  # of a GPU's memory
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Experiment:
    """Data, models and algorithm of a configuration; the same on every rank and for any number of ranks."""

    config: Config  # with `executor` and `lanes` chosen
    division: Division  # the clients' data, and which clients are trained
    cohort: np.ndarray  # [N] the cohort of each client; a cohort has one architecture
    tasks: tuple[Task, ...]  # one per cohort, on the device of this rank
    templates: tuple[Tree, ...]  # one per cohort, what a client keeps between rounds
    computed_on: tuple[str, ...]  # the models of the GPUs that compute it, or the CPU architecture
    on_gpu: bool  # whether the computing ranks use GPUs, even if this rank has none
    transform: Transform | None = None  # applied to training samples

    @property
    def federation(self) -> Federation:
        """The data of the clients that are trained."""
        return self.division.trained

    @cached_property
    def newcomer(self) -> Newcomer | CannotJoin | None:
        """How unseen clients join; None if there are none."""
        if not self.division.unseen_numbers:
            return None
        return self.config.algorithm.newcomer(self.tasks[0].replace(device=HOST))

    @cached_property
    def measures(self) -> dict[str, Measure]:
        """The measures besides accuracy, which tasks of classes always have."""
        task_kind, measures = self.federation.dataset.task_kind, load_measures(self.config.evaluation.measures or ())
        return {name: measure for name, measure in measures.items() if name != "accuracy" or not task_kind.classes}

    @property
    def columns(self) -> list[str]:
        """The columns of metrics.csv."""
        simulated = self.config.training.step_seconds is not None
        return metric_columns([*self.measures], simulated, bool(self.federation.validation))

    @cached_property
    def pool(self) -> Pool:
        """All samples, or their features, on the device of this rank."""
        dataset, device = self.federation.dataset, self.tasks[0].device
        if self.caches_features:
            return Pool.of_features(dataset, self.tasks[0])
        if device.type != "cpu" and dataset.images.nbytes > self.most_resident(device_memory(device)):
            return dataclasses.replace(Pool.of(dataset, HOST), goes_to=device)
        return Pool.of(dataset, device)

    def most_resident(self, memory: float) -> float:
        """Returns how many bytes of samples a GPU with so much memory keeps; more stay on the host."""
        return {"host": 0.0, "auto": memory * _MOST_RESIDENT, "device": math.inf}[self.config.data.resident]

    @property
    def caches_features(self) -> bool:
        """Whether clients train on precomputed features of a frozen body."""
        return self.config.models[0].cache_features

    @property
    def num_participants(self) -> int:
        """Number of clients drawn in each round (P)."""
        return self.config.training.num_drawn(self.federation.num_clients)

    def with_executor(self, executor: str) -> "Experiment":
        """Returns the experiment with this executor, for auto the one that suits the models, and `lanes` chosen."""
        runtime = self.config.runtime.model_copy(update={"executor": executor})
        clients, participants = self.federation.num_clients, self.num_participants
        runtime = choose_executor(runtime, self.tasks, clients, participants, self.on_gpu)
        return dataclasses.replace(self, config=dataclasses.replace(self.config, runtime=runtime))

    def with_run_weights(self) -> "Experiment":
        """Returns the experiment whose models start from the run that `model.weights` names, if any."""
        weights = run_weights(self.config, self.federation.num_clients)
        if weights is None:
            return self
        for cohort, task in enumerate(self.tasks):
            weights.check(task, int(np.argmax(self.cohort == cohort)))
        return dataclasses.replace(self, tasks=tuple(task.replace(first=weights) for task in self.tasks))

    def check_rounds(self, done: int) -> None:
        """Raise `ConfigError` if a round after `done` cannot be computed, or newcomers would train at rate 0."""
        training, evaluation = self.config.training, self.config.evaluation
        participation = Participation(training, self.config.seed, self.federation.num_train)
        checks.check_participation(self.config, self.tasks[0], participation, done)
        if done >= training.rounds:
            return
        checks.warn_of_single_samples(self.config, self.tasks, self.cohort, self.federation.num_train)
        if isinstance(self.newcomer, Newcomer) and self.newcomer.trains:
            why, remedy = f"evaluation.unseen = {evaluation.unseen}", "set training.decay_floor above 0, such as 0.1"
            remedy += f", or training.decay_rounds well above {training.rounds}, or choose another training.schedule"
            checks.check_newcomer_rate(training, training.rounds, evaluation.unseen_updates, why, remedy)

    @property
    def counts(self) -> SampleCounts:
        validation = self.federation.for_validation
        totals = None if validation is None else validation.test_class_counts
        return SampleCounts(self.federation.class_counts, self.federation.test_class_counts, totals)

    @property
    def weights(self) -> list[str]:
        """The weights files that the models start from."""
        recipes = [task.architecture.recipe for task in self.tasks if isinstance(task.architecture, ModuleArchitecture)]
        return [recipe.weights for recipe in recipes if recipe.weights is not None]

    @property
    def frozen_digest(self) -> str:
        """SHA-256 (hex) of all frozen weights; "" if there are none."""
        digests = [task.frozen.digest for task in self.tasks if task.frozen.digest]
        return hashlib.sha256(" ".join(digests).encode()).hexdigest() if digests else ""

    @cached_property
    def code(self) -> dict[str, str]:
        """Hashes of code and weights from outside the package; see `experiment.outside_code`."""
        return code_hashes(self.config)


def load_federation(config: Config) -> Federation:
    return build(load(config.data, config.seed, config.runtime.cache), config.partition, config.data, config.seed)


def prepare(
    config: Config, device: torch.device, gpu_models: Sequence[str] = (), federation: Federation | None = None
) -> Experiment:
    """Builds the experiment of a new run; refuses all that can be refused before the start.

    Args:
        gpu_models: of the ranks that compute; empty on CPUs.
        federation: the clients' data, if already loaded.
    """
    with outside.as_config_error():
        experiment = build_experiment(config, federation or load_federation(config), device, gpu_models)
        experiment.check_rounds(0)
        executor = try_outside_code(experiment, config.runtime.executor)
        return experiment.with_executor(executor).with_run_weights()


def build_experiment(
    config: Config, federation: Federation, device: torch.device, gpu_models: Sequence[str] = ()
) -> Experiment:
    """Binds the models to the data, assigns them to clients, and checks the options; see `prepare`.

    The executor is the one that suits the models.
    """
    if config.evaluation.unseen and config.data.normalize == "pixel":
        raise ConfigError(
            f"evaluation.unseen = {config.evaluation.unseen} with data.normalize = pixel, which computes with the "
            "samples of all clients; choose standard, which leaves unseen ones out"
        )
    division = divide(config, federation)
    dataset = standardise_on_trained(division) if config.data.normalize == "standard" else federation.dataset
    n = division.trained.num_clients
    bound = [_task(model, config, dataset, n, device) for model in config.models][:n]
    tasks = tuple(dict.fromkeys(bound))
    cohort = np.resize([tasks.index(task) for task in bound], n)
    first_two = torch.tensor(dataset.images[:2])
    transform = load_transform(config.data.transform, first_two, config.training.batch_size)
    computed_on = tuple(gpu_models) or (platform.machine(),)
    experiment = Experiment(config, division, cohort, tasks, (), computed_on, bool(gpu_models), transform)
    experiment = experiment.with_executor(config.runtime.executor)
    _check_options(experiment)
    kept_reply = config.algorithm.predicts_with if config.evaluation.absent == "last_received" else ()
    templates = client_templates(config.algorithm, tasks, cohort, kept_reply, config.uplink)
    experiment = dataclasses.replace(experiment, templates=templates)
    trial = partial(_trial, experiment)
    checks.check_optimizer(config.training, trial)
    if config.training.stop is not None:
        checks.check_stop(config.training.stop, config.evaluation, trial())
    return experiment


def divide(config: Config, federation: Federation) -> Division:
    """Divides the clients into those that train and those of `evaluation.unseen`."""
    return hold_out_clients(federation, config.evaluation.unseen, stream(config.seed, 0, -1, "unseen"))


def _task(model: Model, config: Config, dataset: Dataset, num_clients: int, device: torch.device) -> Task:
    """Builds the task of the clients that have a model; moves its frozen part to the device."""
    shape, num_classes = dataset.images.shape[1:], dataset.num_classes
    if isinstance(model, ModuleModel) and dataset.may_be_tokens and config.data.normalize == "fixed":
        # Made-up samples would be all padding.
        architecture = model.bind(shape, num_classes, torch.tensor(dataset.images[:2]))
    else:
        architecture = model.bind(shape, num_classes)
    task = Task(architecture, config.training, num_clients, config.seed, dataset.mean, dataset.std, device)
    task = task.replace(kind=dataset.task_kind, label_shape=dataset.labels.shape[1:])
    _check_axes(task)
    if not (architecture.frozen or model.trainable is not None or model.personal is not None):
        return task
    if isinstance(architecture, ModuleArchitecture):
        names = parameter_names(task.like(), architecture.recipe.head, architecture.findings.entries)
    else:
        names = parameter_names(task.like())
    if paths := find_frozen_paths(model, architecture, names):
        frozen = Frozen.of(architecture.init(stream(config.seed, 0, SERVER, "init")), (*paths, *architecture.constants))
        frozen.on(device)
        task = task.replace(frozen=frozen)
    trained = {path: name for path, name in names.items() if path not in paths}
    personal = (
        () if model.personal is None else match_parameters("model.personal", model.personal, trained, architecture.name)
    )
    return task.replace(personal=personal)


def _check_axes(task: Task) -> None:
    """Raise `ConfigError` for a model whose scores do not have the axes that the labels need."""
    architecture, needed = task.architecture, task.score_shape[:-1]
    axes = architecture.findings.axes if isinstance(architecture, ModuleArchitecture) else ()
    if axes != needed:
        scores, allowed = (", ".join(["B", *map(str, middle), "K"]) for middle in (axes, needed))
        raise ConfigError(
            f"model {architecture.name} has scores [{scores}], and labels of this data.task need [{allowed}]; choose a "
            "model that has them, such as a module of your own"
        )


def _check_options(experiment: Experiment) -> None:
    """Raises `ConfigError` for options that do not suit the algorithm, the models or the data."""
    config, tasks = experiment.config, experiment.tasks
    algorithm, training = config.algorithm, config.training
    checks.check_kind(algorithm, tasks[0])
    checks.check_loss(tasks[0])
    check_parts(algorithm, tasks)
    if any(model.cache_features for model in config.models):
        checks.check_cached_features(config, tasks[0], experiment.transform, experiment.federation.dataset.images[:2])
    check_declarations(algorithm, tasks[0])
    check_cohorts(algorithm, tasks)
    check_heads(algorithm, tasks)
    checks.check_options(algorithm, tasks)
    checks.check_uplink(config.uplink, algorithm, tasks[0])
    checks.check_measures(experiment.measures, tasks[0])
    algorithm.check(tasks[0], experiment.num_participants)
    checks.check_passes(training, algorithm.passes(tasks[0], 1), experiment.division.everyone.num_train)


def try_outside_code(experiment: Experiment, configured: str) -> str:
    """Tries what is from outside the package, once before a new run; returns the executor that suits it.

    Args:
        configured: `runtime.executor` of the configuration.

    Raises:
        ConfigError: a module is not trained as PyTorch trains it, a transform draws random numbers of its own, or what
            is from outside cannot be computed in lanes, and those are configured.
        AlgorithmError: `client_update` returns other values when it is called again.
    """
    config, tasks, cohort = experiment.config, experiment.tasks, experiment.cohort
    algorithm, images, executor = config.algorithm, experiment.federation.dataset.images, config.runtime.executor
    for task in tasks:
        checks.check_frozen_head(task)
    check_draws(config.data.transform, torch.tensor(images[:2]), config.training.batch_size)
    problem = check_modules(tasks, cohort, experiment.federation, executor == "lanes")
    if outside.is_from_outside(type(algorithm)):
        trial = _trial(experiment)
        check_repeats(trial)
        check_prediction(trial)
    if not problem and executor == "lanes":
        try:
            problem = find_lane_problem(algorithm, tasks, cohort, experiment.transform, images)
        except Exception as error:
            if configured == "lanes":
                raise
            _trial(experiment).try_update()  # raises an error that the loop has too
            problem = first_line(error)
    if not problem:
        return executor
    if configured == "lanes":
        raise ConfigError(f"{problem}{IN_LANES}")
    _log.warning("clients are computed one after the other (runtime.executor: loop): %s", problem)
    return "loop"


def _trial(experiment: Experiment) -> OneStep:
    one_client = dataclasses.replace(experiment, division=only_largest_client(experiment.division))
    return executor_of(one_client, OneStep)


def setup(experiment: Experiment, ranks: int, slots: int, rank: int | None = None) -> Setup:
    """Builds the setup of the rounds of an experiment.

    Args:
        experiment: from `prepare`.
        slots: how many ranks can compute at once (cores or GPUs).
        rank: this one, whose GPU then keeps only the samples of its own clients; None: any client may be computed.
    """
    config, federation, device = experiment.config, experiment.federation, experiment.tasks[0].device
    algorithm, task, runtime = config.algorithm, experiment.tasks[0].replace(device=HOST), config.runtime
    executor = executor_of(
        experiment, Lanes if runtime.executor == "lanes" else Loop, Pool.of(federation.dataset, HOST)
    )
    up, down = dict(algorithm.uplink(task)), dict(algorithm.downlink(task))
    declared = Declared(up, down, federation.class_counts > 0, federation.num_train, config.uplink)
    placement = make_placement(executor, declared, experiment.templates, runtime, ranks, slots)
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
    """Builds the setup of the tests of unseen clients, to which models are assigned in turn; None if none can join."""
    if not isinstance(experiment.newcomer, Newcomer):
        return None
    evaluation, everyone, cohort = experiment.config.evaluation, experiment.division.everyone, experiment.cohort
    cohort = np.concatenate([cohort, np.resize(cohort, everyone.num_clients - len(cohort))])
    whole = dataclasses.replace(executor, federation=everyone, cohort=cohort)
    lanes = experiment.config.runtime.lanes or 1
    return unseen_setup(whole, declared.published, placement, lanes, experiment.newcomer, evaluation.unseen_updates)


def executor_of(experiment: Experiment, kind: Callable[..., E], pool: Pool | None = None) -> E:
    """Builds the executor of an experiment, with all samples on its device unless a pool is given."""
    config, federation, pool = experiment.config, experiment.federation, pool or experiment.pool
    batch, transform = config.evaluation.batch_size, experiment.transform
    tasks = experiment.tasks
    if experiment.caches_features:
        tasks = tuple(task.replace(cached_features=True) for task in tasks)
    first_test = min(config.evaluation.every, config.training.rounds)
    return kind(
        config.algorithm, tasks, experiment.cohort, federation, pool, batch, transform, experiment.measures, first_test
    )
