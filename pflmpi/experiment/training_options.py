"""Whether the options of the `training` section go together, and with the algorithm."""

from pflmpi.algorithms.base import Algorithm, CannotJoin
from pflmpi.errors import ConfigError
from pflmpi.learning.early_stop import EarlyStopConfig
from pflmpi.learning.task import HOST, Task
from pflmpi.learning.training import TrainingConfig
from pflmpi.runtime.config import EvaluationConfig
from pflmpi.runtime.executors.one_step import OneStep
from pflmpi.text import shown

_DEFAULT = TrainingConfig()
_TRIED = 10  # rounds at most; an algorithm may begin with one that trains nothing


def check_options(algorithm: Algorithm, task: Task) -> None:
    """Raise `ConfigError` for an option without effect, or one that the algorithm cannot follow."""
    training, kind = task.training, type(algorithm).__name__
    _check_schedule(training)
    adam = training.optimizer != "sgd"
    for key, allowed, where in (
        ("momentum", not adam, "training.optimizer: sgd"),
        *((key, adam, "training.optimizer: adam or adamw") for key in ("beta1", "beta2", "epsilon")),
        ("keep_optimizer", adam or training.momentum > 0, "momentum, or training.optimizer: adam or adamw"),
    ):
        _check_effect(training, key, allowed, where)
    if algorithm.own_steps:
        for key in ("optimizer", "clip_norm", "keep_optimizer"):
            if getattr(training, key) != getattr(_DEFAULT, key):
                raise ConfigError(
                    f"training.{key} = {shown(getattr(training, key))}, but clients of {kind} take "
                    f"{algorithm.own_steps}; leave it out, or choose another algorithm"
                )
    if training.keep_optimizer and not algorithm.trainings(task):
        raise ConfigError(
            f"training.keep_optimizer: {kind} has no training whose optimizer could go on in the next round "
            "(`trainings`); set it to false"
        )


def check_stop(stop: EarlyStopConfig, evaluation: EvaluationConfig, trial: OneStep) -> None:
    """Raise `ConfigError` for an early stop by a metric that is never measured."""
    algorithm, task, why = trial.algorithm, trial.tasks[0], ""
    if stop.metric.startswith("unseen"):
        rule = algorithm.newcomer(task.replace(device=HOST)) if evaluation.unseen else None
        why = "" if evaluation.unseen else "there are no unseen clients (evaluation.unseen = 0)"
        why = f"unseen clients are not tested: {rule.why}" if isinstance(rule, CannotJoin) else why
    elif stop.metric == "train_loss":
        rounds = range(1, min(task.training.rounds, _TRIED) + 1)
        if not any(trial.counts_loss(0, round) for round in rounds):
            why = f"the local training of {type(algorithm).__name__} measures no loss"
    if why:
        raise ConfigError(f"training.stop.metric = {shown(stop.metric)}, but {why}; choose another metric")


def _check_schedule(training: TrainingConfig) -> None:
    schedule = training.schedule
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
        raise ConfigError(f"training.{key} = {shown(value)} has an effect with {where} only; leave it out, or set that")
