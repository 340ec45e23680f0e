"""A client's update and test in one step, tried before the run, and what an own algorithm must hold in them."""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.algorithms.base import Algorithm, initial_client
from pflmpi.data.unseen import Division
from pflmpi.errors import AlgorithmError, ConfigError
from pflmpi.experiment.made_up_inputs import make_up_first_messages
from pflmpi.learning.local_training import LocalTraining
from pflmpi.learning.participation import Participation
from pflmpi.learning.personal import NotAModel
from pflmpi.learning.task import HOST
from pflmpi.learning.training import Pass
from pflmpi.messages.kinds import Messages, as_messages
from pflmpi.rng import stream
from pflmpi.runtime.contract import (
    calling,
    check_repeated,
    check_scores,
    check_state,
    collect_inputs,
    state_and_messages,
)
from pflmpi.runtime.executors.base import Loop
from pflmpi.tree import Tree

_TRIAL_RATE, _TRIAL_SAMPLES = 0.1, 8  # where results of trials are compared within rounding
_SCORE_ROUNDING = 5e-3  # allowed difference of scores, relative to 1 + the largest: they may be rounded to bf16
_MOST_TRIED = 10  # rounds; an algorithm may begin with rounds that train nothing


def only_largest_client(division: Division) -> Division:
    """Returns the client with most training samples, as client 0: a trial need not move all samples to the device."""
    samples, dataset = max(division.trained.train, key=len), division.trained.dataset
    dataset = replace(dataset, images=dataset.images[samples], labels=dataset.labels[samples])
    return replace(division, trained=replace(division.trained, dataset=dataset, train=(np.arange(len(samples)),)))


class OneStep(Loop):
    """The loop executor, with only the first batch of each pass, whatever the deadline."""

    @functools.cached_property
    def participation(self) -> Participation:
        """Without a deadline: the speed of client 0 is not that of the client that is tried as client 0."""
        participation = super().participation
        return replace(participation, training=participation.training.model_copy(update={"deadline": None}))

    def order(self, client: int, round: int, name: str, length: Pass, state: Tree) -> list[np.ndarray]:
        return super().order(client, round, name, length, state)[:1]

    def takes_step(self, trainings: tuple[str, ...]) -> bool | None:
        """Whether client 0 takes an optimizer step of these trainings (() for any) in one of the first rounds.

        None where it has no minibatch in any of these rounds, or only for fine-tuning (`adapts_with`).
        """
        rounds = range(1, min(self.tasks[0].training.rounds, _MOST_TRIED) + 1)
        results = []
        for round in rounds:
            results.append(self._takes_step_in(round, trainings))
            if results[-1]:
                return True
        return False if False in results else None

    def _takes_step_in(self, round: int, trainings: tuple[str, ...]) -> bool | None:
        """As `takes_step` for one round, with the messages of the first."""
        task, local = self.tasks[self.cohort[0]], LocalTraining(None, trainings)
        state = initial_client(self.algorithm, task.replace(device=HOST), 0)
        passes = self.passes(np.array([0]), round)
        filled = [name for name, length in passes.items() if self.order(0, round, name, length, state)]
        if not filled:
            return None
        next(self.try_updates(round, local))
        only_to_adapt = set(filled) <= set(self.algorithm.adapts_with)
        return None if only_to_adapt and not local.counted else local.counted

    def with_plain_steps(self) -> "OneStep":
        """Returns it with steps of SGD that are large enough for comparing what they lead to."""
        training = self.tasks[0].training
        plain = {"lr": _TRIAL_RATE / training.decay(1), "optimizer": "sgd", "precision": "fp32"}
        training = training.model_copy(update=plain)
        return replace(self, tasks=tuple(task.replace(training=training) for task in self.tasks))

    def try_updates(self, round: int, local: LocalTraining) -> Iterator[Tree]:
        """Yields the state and messages of client 0 after a round with made-up messages, anew each time."""
        task, passes = self.tasks[self.cohort[0]], self.passes(np.array([0]), round)
        state, down = self._begin(round)
        while True:
            data = self._data(0, round, passes, state)
            reads = collect_inputs(state, down, data.class_counts)
            with calling(self.algorithm, "client_update", round, [0], reads=reads):
                returned = self.algorithm.client_update(task.replace(local=local), state, {**down}, data)
            new, up = state_and_messages(self.algorithm, "client_update", returned)
            yield {"state": new, "up": {**up}}

    def try_update(self) -> Tree:
        """Returns the state and messages of client 0 after the first round."""
        return next(self.try_updates(1, LocalTraining(None, ())))

    def try_scores(self) -> tuple[Tensor, Tensor]:
        """Scores [B, ...] of samples after an update of client 0: those of `predict`, those of the model in `personal`.

        The first are those of a test, for which the state is adapted; the second those of a checkpoint.
        """
        task, algorithm = self.tasks[self.cohort[0]], self.algorithm
        (first, down), update = self._begin(1), self.try_update()
        check_state(algorithm, "client_update", update["state"], first)
        state = tree.part(update, "state")
        data = self._data(0, 1, self.passes_to_adapt(np.array([0]), 1), state)
        adapted = self._adapted(task, 0, state, down, data) if self.adapts else state
        x = next(iter(data.train)).x[:_TRIAL_SAMPLES]
        with calling(algorithm, "predict", 1, [0], reads={"client": adapted, "down": {**down}}), torch.no_grad():
            tested = algorithm.predict(task, adapted, down, x)
            check_scores(algorithm, tested, len(x), task.score_shape)
            return tested, Algorithm.predict(algorithm, task, state, down, x)

    def _begin(self, round: int) -> tuple[Tree, Messages]:
        """The first state of client 0, and the made-up messages that it receives in a round."""
        task = self.tasks[self.cohort[0]]
        rng, on_host = stream(task.seed, round, 0, "one step"), task.replace(device=HOST)
        state = initial_client(self.algorithm, on_host, 0)
        received: Tree = {**make_up_first_messages(self.algorithm, on_host, 0, rng)}
        return tree.to(state, self.device), as_messages(tree.to(received, self.device))


def check_repeats(trial: "OneStep") -> None:
    """Raise `AlgorithmError` if `client_update` returns other values when it is called again."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with several PyTorch adds some gradients in any order
    try:
        first, again = itertools.islice(trial.try_updates(1, LocalTraining(None, ())), 2)
    except AlgorithmError as error:
        if error.__cause__:  # perhaps because of made-up messages; the first round will raise a real one
            return
        raise
    finally:
        torch.set_num_threads(threads)
    check_repeated(trial.algorithm, "client_update", first, again)


def check_prediction(trial: "OneStep") -> None:
    """Raise `ConfigError` if clients are tested with other scores than those of the model that `personal` describes."""
    algorithm, task = trial.algorithm, trial.tasks[trial.cohort[0]]
    personal, kind = algorithm.personal(task), type(algorithm).__name__
    if type(algorithm).predict is Algorithm.predict or isinstance(personal, NotAModel):
        return
    try:
        tested, described = trial.with_plain_steps().try_scores()
    except AlgorithmError:  # the first test will raise it
        return
    if task.kind.classes:  # a number that is added to all scores of a sample changes nothing
        tested, described = tested.log_softmax(-1), described.log_softmax(-1)
    difference, largest = float((tested - described).abs().max()), float(described.abs().max())
    if math.isfinite(largest) and not difference <= _SCORE_ROUNDING * (1 + largest):
        raise ConfigError(
            f"{kind}.predict scores samples otherwise (by up to {difference:.2g} in a trial) than the model that "
            f"{kind}.personal describes, which checkpoints and `export` would have in its place; let "
            "`personal` return NotAModel('WHAT A CLIENT PREDICTS WITH', nearest=THAT MODEL) of "
            "pflmpi.learning.personal, or leave `predict` out"
        )
