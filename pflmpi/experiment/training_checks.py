"""Checks before the first round: training options that do not fit each other, the data or the algorithm."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch

from pflmpi import outside, tree
from pflmpi.algorithms import ALGORITHMS
from pflmpi.algorithms.base import Algorithm, CannotJoin, initial_client, initial_received, training_passes
from pflmpi.config.load import Config
from pflmpi.data.task_kinds import TASK_KINDS, TaskKind
from pflmpi.errors import AlgorithmError, ConfigError, RunError
from pflmpi.experiment.made_up_inputs import make_up_labels
from pflmpi.experiment.trial_update import OneStep
from pflmpi.learning.early_stop import EarlyStopConfig
from pflmpi.learning.measures import MEASURES, Measure, compute_measures
from pflmpi.learning.participation import SELECTIONS, Participation, is_trace
from pflmpi.learning.task import HOST, Task
from pflmpi.learning.training import Pass, TrainingConfig, count_samples
from pflmpi.learning.transforms import Transform
from pflmpi.messages.kinds import Mean, OwnClasses, Uplink
from pflmpi.messages.uplink_transforms import ALLOWED, UplinkConfig
from pflmpi.models.base import Architecture
from pflmpi.models.torch_module import ModuleArchitecture
from pflmpi.registry import format_unknown_name
from pflmpi.runtime.config import EvaluationConfig
from pflmpi.runtime.contract import calling
from pflmpi.runtime.counts import measure_columns
from pflmpi.runtime.progress import metric_columns
from pflmpi.text import join_truncated, short_repr
from pflmpi.tree import Tree

_DEFAULT = TrainingConfig()
_PARTICIPATION_KEYS = ("selection", "dropout", "deadline", "without_clients")  # which change who trains in a round
_OPTIMIZER_KEYS = ("optimizer", "momentum", "weight_decay", "clip_norm")
_MEASURED = 5  # times; a mean over few samples that are drawn anew may come out alike
_MOST_STEPS = 1_000_000  # of one client in one round, whose batch order is drawn at once
_log = logging.getLogger(__name__)


def check_options(algorithm: Algorithm, tasks: Sequence[Task]) -> None:
    """Raise `ConfigError` for an option without effect, or one that the algorithm cannot follow."""
    task, training, kind = tasks[0], tasks[0].training, type(algorithm).__name__
    _check_schedule(training)
    _check_effect(training, "bn", any("stats" in task.like() for task in tasks), "a model with batch norm")
    if training.init != _DEFAULT.init and not _begins_differently(algorithm, task):
        raise ConfigError(
            f"training.init = {training.init} has no effect: the clients of {kind} begin with what the server sends; "
            "leave it out, or choose another algorithm"
        )
    if training.steps is not None and training.epochs != _DEFAULT.epochs:
        raise ConfigError(
            f"training.epochs = {training.epochs} has no effect beside training.steps = {training.steps}, which is the "
            f"length of local training instead; set epochs to {_DEFAULT.epochs}, or steps to null"
        )
    adam = training.optimizer != "sgd"
    for key, allowed, where in (
        ("momentum", not adam, "training.optimizer: sgd"),
        *((key, adam, "training.optimizer: adam or adamw") for key in ("beta1", "beta2", "epsilon")),
        ("keep_optimizer", adam or training.momentum > 0, "momentum, or training.optimizer: adam or adamw"),
    ):
        _check_effect(training, key, allowed, where)
    _check_micro_batch(algorithm, task)
    _check_simulation(algorithm, task)
    if training.keep_optimizer and not algorithm.trainings(task):
        raise ConfigError(
            f"training.keep_optimizer: {kind} has no training whose optimizer could go on in the next round "
            "(`trainings`); set it to false"
        )


def _check_micro_batch(algorithm: Algorithm, task: Task) -> None:
    if (size := task.training.micro_batch) is None:
        return
    if type(task.kind).weights is not TaskKind.weights:
        why = f"data.task {type(task.kind).__name__.lower()}, whose samples count differently in the mean of a batch"
    elif algorithm.needs_whole_batch:
        why = f"{type(algorithm).__name__}, whose loss with these options is no mean over the samples of a batch"
    else:
        return
    raise ConfigError(
        f"training.micro_batch = {size} with {why}, so that gradients of its parts do not add up to that of the batch; "
        "leave it null, and lower training.batch_size"
    )


def _begins_differently(algorithm: Algorithm, task: Task) -> bool:
    """Whether clients that draw models of their own begin with other states than with one draw for all."""
    one_draw = task.replace(training=task.training.model_copy(update={"init": _DEFAULT.init}))
    states: list[Tree] = []
    for drawn in (task.replace(device=HOST), one_draw.replace(device=HOST)):
        with calling(algorithm, "init_client", 0):
            kept = initial_received(algorithm, drawn, 0)
            states.append({"state": initial_client(algorithm, drawn, 0), "received": {**kept}})
    pairs = zip(*map(tree.leaves, states), strict=True)
    return any(not torch.equal(own, common) for (_, own), (_, common) in pairs)


def check_uplink(config: UplinkConfig, algorithm: Algorithm, task: Task) -> None:
    """Raise `ConfigError` for a transform of messages without effect, or of one for which it has no meaning."""
    for key, needed in (("noise", "clip"), ("delta", "noise")):
        if (value := getattr(config, key)) is not None and getattr(config, needed) is None:
            raise ConfigError(
                f"uplink.{key} = {value} needs uplink.{needed}, which is not set; set it, or leave {key} out"
            )
    up, chosen = algorithm.uplink(task), config.chosen
    why = next(filter(None, (_untransformable(name, up[name], chosen, algorithm, task) for name in up)), "")
    if chosen and (why or not up):
        keys = ", ".join(f"uplink.{key} = {value:g}" for key, value in chosen.items())
        raise ConfigError(
            f"{keys}: {type(algorithm).__name__} sends {why or 'nothing'}; leave it out, or choose an algorithm that "
            "averages models"
        )


def _untransformable(name: str, kind: Uplink, chosen: Iterable[str], algorithm: Algorithm, task: Task) -> str:
    """Returns the message, and why one of the chosen transforms cannot be applied to it; "" if all can."""
    allowed, received = ALLOWED.get(type(kind), ()), algorithm.downlink(task).get(name)
    if wrong := next((key for key in chosen if key not in allowed), None):
        known = f"; of that only {' and '.join(allowed)} has a meaning" if allowed else ""
        return f"{name!r} as {type(kind).__name__}, of which {wrong} has no meaning{known}"
    if not isinstance(kind, Mean):
        return ""
    other = received is None or isinstance(received, OwnClasses) or tree.differences(received.like, kind.like)
    if algorithm.introduces:
        return f"{name!r} before the first round too, when nothing has been received"
    if other and not kind.is_change:
        return (
            f"{name!r} without having received the same, so that there is no change to transform (a message that is a "
            "change itself is declared with Mean(..., is_change=True))"
        )
    for path, leaf in tree.leaves(kind.like):
        if path.split("/")[0] in task.shared_stats:
            return f"{path}, which a transform could make negative (training.bn: local keeps it with the client)"
        if leaf.dtype != torch.float32:
            return f"{path} in {name!r}, which is {str(leaf.dtype)[6:]} and not float32"
    return ""


def check_participation(config: Config, task: Task, participation: Participation, done: int) -> None:
    """Raise `ConfigError` where a round after `done` would have too few clients, or an id is of no client."""
    training, num_clients = config.training, len(participation.num_train)
    if training.without_clients and (largest := max(training.without_clients)) >= num_clients:
        raise ConfigError(
            f"training.without_clients has {largest}; the clients are 0 to {num_clients - 1}, leave it out"
        )
    if all(getattr(training, key) == getattr(_DEFAULT, key) for key in _PARTICIPATION_KEYS):
        return
    is_own = SELECTIONS.reference(training.selection) is not None
    num_clients_of = dict[int, int]()  # by round
    for round in range(done + 1, training.rounds + 1):
        clients = participation.participants(round)
        num_clients_of[round] = len(clients)
        if is_own and not np.array_equal(participation.participants(round), clients):
            raise ConfigError(
                f"training.selection = {short_repr(training.selection)} returns other clients at a second call; it "
                "must follow from its arguments alone, and draw from `rng`"
            )
    if not num_clients_of:
        return
    fewest = min(num_clients_of, key=num_clients_of.__getitem__)
    if not num_clients_of[fewest]:
        keys = [key for key in _PARTICIPATION_KEYS if getattr(training, key) != getattr(_DEFAULT, key)]
        remedy = "raise training.deadline" if "deadline" in keys else "leave fewer clients out"
        raise ConfigError(
            f"training.{' and '.join(keys)} {'leaves' if len(keys) == 1 else 'leave'} nobody to train in round "
            f"{fewest}; {remedy}, or raise training.participation"
        )
    config.algorithm.check(task, num_clients_of[fewest])


def check_newcomer_rate(training: TrainingConfig, done: int, updates: int, why: str, remedy: str) -> None:
    """Raise `ConfigError` where newcomers that make so many updates after round `done` would train at rate 0."""
    if training.decay_by == "rounds":  # otherwise each update is as in a first participation
        last = done + updates
        check_rate(training, training.decay(last), f"{why}: after round {done} unseen clients", last, remedy)


def check_rate(training: TrainingConfig, decay: float, who: str, round: int, remedy: str) -> None:
    """Raise `ConfigError` if `decay`, the factor on the learning rates of a round, is 0."""
    if decay == 0:
        raise ConfigError(
            f"{who} train at the learning rate of round {round}, which training.schedule = {training.schedule} makes "
            f"0; {remedy}"
        )


def check_frozen_head(task: Task) -> None:
    """Raises `ConfigError` if the head is frozen, and made anew because the file of weights has none that fits."""
    architecture = task.architecture
    if not isinstance(architecture, ModuleArchitecture) or architecture.recipe.weights is None:
        return
    if architecture.draws_head and any(path.startswith("head/") for path in task.frozen.paths):
        raise ConfigError(
            f"model.weights = {architecture.recipe.weights!r} has no {architecture.recipe.head} for "
            f"{architecture.num_classes} classes, and a head that is made anew needs training; let model.trainable "
            "name it, or give a file with such a head"
        )


def check_cached_features(config: Config, task: Task, transform: Transform | None, images: np.ndarray) -> None:
    """Raise `ConfigError` where `model.cache_features` could change what is computed.

    Args:
        images: two samples of the dataset.
    """
    model, body = task.architecture.name, [path for path, _ in tree.leaves({**task.like("body")})]
    if len(config.models) > 1:
        why = f"there are {len(config.models)} models, and features are kept for one; give all clients the same"
    elif transform is not None:
        why = "data.transform changes samples in each step; leave it out"
    elif body:
        name = body[0].removeprefix("body/").replace("/", ".")
        why = f"{name} of model {model} is trained, and only its head may be; say so by model.trainable"
    elif not any(path.startswith("body/") for path in task.frozen.paths):
        why = f"model {model} has no frozen body; leave the key out"
    elif task.architecture.has_batch_norm:
        why = f"batch norm of model {model} follows the batches; keep it in evaluation mode, or set model.norm: group"
    else:
        x = task.prepare(torch.tensor(images, device=task.device))
        noise: Tree = {"noise": {"key": torch.tensor(1)}}
        with torch.no_grad():
            trained, tested = (task.features(tree.to(noise, task.device), x, training) for training in (True, False))
        same = torch.allclose(trained, tested, rtol=1e-4, atol=1e-5)  # attention has another kernel in evaluation
        why = "" if same else f"dropout, or what else model {model} does in training alone, changes them"
    if why:
        raise ConfigError(f"model.cache_features = true, but {why}")


def _check_simulation(algorithm: Algorithm, task: Task) -> None:
    training, kind = task.training, type(algorithm).__name__
    for key in ("step_spread", "deadline"):
        _check_effect(training, key, training.step_seconds is not None, "training.step_seconds")
    _check_effect(training, "participation", not is_trace(training.selection), "a training.selection that is no file")
    passes = training_passes(algorithm, task, 1)
    if training.deadline is not None and (len(passes) != 1 or not algorithm.partial_work):
        why = (
            f"trains in {len(passes)} passes ({', '.join(passes)})" if len(passes) != 1 else "assumes all of its steps"
        )
        raise ConfigError(
            f"training.deadline = {training.deadline}, before which slow clients take fewer steps, but the local "
            f"update of {kind} {why}; leave it out, or choose another algorithm"
        )


def check_stop(stop: EarlyStopConfig, evaluation: EvaluationConfig, trial: OneStep) -> None:
    """Raise `ConfigError` for an early stop by a metric that is never measured."""
    algorithm, task, why = trial.algorithm, trial.tasks[0], ""
    if stop.metric not in (columns := metric_columns([*trial.measures], simulated=False)):
        raise ConfigError(
            f"training.stop.metric: {format_unknown_name('column', stop.metric, columns)}; see evaluation.measures"
        )
    if stop.metric.startswith("unseen_") and trial.federation.validation:
        why = "rounds are chosen by validation samples, and unseen clients have none"
    elif stop.metric.startswith("unseen_"):
        rule = algorithm.newcomer(task.replace(device=HOST)) if evaluation.unseen else None
        why = "" if evaluation.unseen else "there are no unseen clients (evaluation.unseen = 0)"
        why = f"unseen clients are not tested: {rule.why}" if isinstance(rule, CannotJoin) else why
    elif stop.metric.startswith("trained_") and evaluation.when == "before" and not trial.federation.validation:
        why = "clients are not tested after local training (evaluation.when = before)"
    elif stop.metric == "train_loss" and not trial.takes_step(algorithm.measured):
        why = f"the local training of {type(algorithm).__name__} measures no loss"
    column = stop.metric.removeprefix("unseen_").removeprefix("trained_")
    measure = "accuracy" if column in measure_columns("accuracy") else "f1_macro" if column == "f1_macro" else ""
    if measure and not task.kind.classes and measure not in trial.measures:
        why = "the labels of this data.task are no classes"
    if why:
        raise ConfigError(f"training.stop.metric = {short_repr(stop.metric)}, but {why}; choose another metric")


def check_optimizer(training: TrainingConfig, trial: Callable[[], OneStep]) -> None:
    """Raise `ConfigError` for options of the optimizer where local training never uses it."""
    chosen = [key for key in _OPTIMIZER_KEYS if getattr(training, key) != getattr(_DEFAULT, key)]
    if not chosen:
        return
    tried = trial()
    try:
        takes_step = tried.takes_step(())
    except AlgorithmError:  # perhaps because of made-up messages; the first round will raise a real one
        return
    if takes_step is False:
        raise ConfigError(
            f"training.{chosen[0]} = {short_repr(getattr(training, chosen[0]))} has no effect: the local training of "
            f"{type(tried.algorithm).__name__} takes no step of the optimizer (`train`, `alternate`); leave it out, or "
            "choose another algorithm"
        )


def check_measures(measures: Mapping[str, Measure], task: Task) -> None:
    """Raise `ConfigError` for a measure without a meaning for the task, or without one value for made-up scores."""
    rng, count = np.random.default_rng(0), 2 * task.num_classes + 1
    for name in measures:
        if name in [*MEASURES] and task.kind.measures and name not in task.kind.measures:
            raise ConfigError(
                f"evaluation.measures: {name} has no meaning for the labels of this data (data.task); choose "
                f"{', '.join(task.kind.measures)}, or a function of your own"
            )
    try:
        scores, labels = rng.normal(size=(count, *task.score_shape)), make_up_labels(task, (count,), rng).numpy()
        scored = task.kind.scored(scores, labels)
        compute_measures(measures, *scored)
        own = {name: measure for name, measure in measures.items() if name not in [*MEASURES]}
        repeated = np.array([compute_measures(own, *scored) for _ in range(_MEASURED)])
    except RunError as error:
        raise ConfigError(f"evaluation.measures: {error}") from error
    for name, values in zip(own, repeated.T, strict=True):
        if not np.array_equal(values[1:], values[:-1], equal_nan=True):
            raise ConfigError(
                f"evaluation.measures: {name} has other values of the same scores and labels when it is called again, "
                "so that a run could not be repeated; let it draw nothing, or from a generator that it makes in each "
                "call, such as np.random.default_rng(0)"
            )


def check_loss(task: Task) -> None:
    """Raise `ConfigError` for a task from outside whose loss of made-up scores is not one of each sample."""
    if not outside.is_from_outside(type(task.kind)):
        return
    rng, count, name = np.random.default_rng(0), 2 * task.num_classes + 1, f"{type(task.kind).__name__}.loss"
    scores = torch.from_numpy(rng.normal(size=(count, *task.score_shape))).float().requires_grad_()
    loss = task.kind.loss(scores, make_up_labels(task, (count,), rng))
    if not isinstance(loss, torch.Tensor) or loss.shape != (count,):
        returned = list(loss.shape) if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        raise ConfigError(
            f"data.task: {name} returns {returned} for {count} samples; expected [{count}], the loss of each sample "
            "(reduction='none')"
        )
    if not loss.requires_grad:
        raise ConfigError(
            f"data.task: {name} has no gradient by the scores; compute it from them by functions of torch, without "
            "detach() or NumPy"
        )


def check_kind(algorithm: Algorithm, task: Task) -> None:
    """Raise `ConfigError` for an algorithm, or an option, that has a meaning for cross-entropy of classes alone."""
    if task.kind.cross_entropy:
        return
    name = TASK_KINDS.name_of(type(task.kind))
    if not algorithm.any_task:
        others = ", ".join(name for name, kind in ALGORITHMS.items() if kind.any_task)
        raise ConfigError(
            f"data.task = {short_repr(name)}: {type(algorithm).__name__} computes with classes, and is not said to "
            f"have a meaning for others (any_task); choose {others}"
        )
    if smoothing := task.training.label_smoothing:
        raise ConfigError(
            f"training.label_smoothing = {smoothing} spreads labels over classes, and data.task is {name}; leave it out"
        )


def _check_schedule(training: TrainingConfig) -> None:
    schedule = training.schedule
    falls = schedule != "constant" or training.warmup > 0
    _check_effect(training, "decay_by", falls, "a training.schedule that is not constant, or training.warmup")
    for key, users in (
        ("lr_decay", ("exponential", "step")),
        ("decay_rounds", ("step", "cosine")),
        ("decay_floor", ("cosine",)),
    ):
        _check_effect(training, key, schedule in users, f"training.schedule: {' or '.join(users)}")
    if schedule == "step" and training.decay_rounds is None:
        raise ConfigError("training.schedule: step needs training.decay_rounds, the rounds from one fall to the next")


def _check_effect(training: TrainingConfig, key: str, allowed: bool, where: str) -> None:
    value = getattr(training, key)
    if not allowed and value != getattr(_DEFAULT, key):
        raise ConfigError(
            f"training.{key} = {short_repr(value)} has an effect with {where} only; leave it out, or set that"
        )


def check_passes(training: TrainingConfig, passes: Mapping[str, Pass], num_train: np.ndarray) -> None:
    """Raise `ConfigError` for a pass that no client makes, or a client cannot finish; warn if some train nothing.

    Args:
        passes: of a round, by name.
        num_train: [N] training samples of each client.
    """
    largest = int(num_train.argmax())
    idle = np.zeros(len(num_train), bool)
    for name, length in passes.items():
        samples = np.array([count_samples(int(count), length) for count in num_train])
        if (steps := training.num_steps(int(samples[largest]), length)) > _MOST_STEPS:
            raise ConfigError(
                f"the pass {name!r} of client {largest} has {steps} steps in one round; allowed are {_MOST_STEPS}: "
                "lower training.epochs or training.steps, or raise training.batch_size"
            )
        if training.drop_last and (short := samples < training.batch_size).all():
            raise ConfigError(
                f"training.batch_size = {training.batch_size} with training.drop_last leaves every client without a "
                f"batch: the largest, client {largest}, has {samples[largest]} training samples"
                f"{'' if len(passes) == 1 else f' for the pass {name!r}'}; lower it, or set drop_last: false"
            )
        elif training.drop_last:
            idle |= short
    if idle.any():
        _log.warning(
            "%d of %d clients have fewer training samples than training.batch_size = %d, and with training.drop_last "
            "they train nothing",
            int(idle.sum()),
            len(idle),
            training.batch_size,
        )


def warn_of_single_samples(config: Config, tasks: Sequence[Task], cohort: np.ndarray, num_train: np.ndarray) -> None:
    """Warn of clients whose last batch has one sample, if training of their model fails on it.

    Args:
        tasks: one per cohort.
        cohort: [N] the cohort of each client.
        num_train: [N] training samples of each client.
    """
    training, size, has_single = config.training, config.training.batch_size, np.zeros(len(cohort), bool)
    if training.drop_last or config.runtime.client_errors == "skip":
        return
    if not any(task.architecture.has_batch_norm for task in tasks):
        return
    for length in training_passes(config.algorithm, tasks[0], 1).values():
        if length.share == 1:
            samples = [count_samples(int(count), length) for count in num_train]
            has_single |= [count % size == 1 and training.num_steps(count, length) > count // size for count in samples]
    for number, architecture in enumerate(task.architecture for task in tasks):
        clients = np.flatnonzero(has_single & (cohort == number))
        if len(clients) and architecture.has_batch_norm and _fails(architecture, 1) and not _fails(architecture, 2):
            _log.warning(
                "batch norm of model %s ends the run at a batch of one sample, such as the last one of %s; "
                "training.drop_last = true leaves incomplete batches out",
                architecture.name,
                join_truncated([f"client {client}" for client in clients]),
            )


def _fails(architecture: Architecture, size: int) -> bool:
    """Whether a model in training fails on a batch of zeros of a size."""
    model: Tree = {**architecture.init(np.random.default_rng(0)), "noise": {"key": torch.tensor(0)}}
    try:
        architecture.features(model, torch.zeros(size, *architecture.shape), training=True)
    except Exception:
        return True
    return False
