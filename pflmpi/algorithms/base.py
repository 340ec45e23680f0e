"""The contract of an algorithm.

Over the whole run, the runtime does exactly this (see `runtime/rounds.py`):

    server = server_update(server, up of introduce over all clients)      only where the algorithm introduces
    down = publish(server)
    for each round:
        clients, up = client_update over the participants
        server = server_update(server, up);  down = publish(server), to each participant its answer(up)
        when due: evaluate (adapt, predict) on every client;  write the checkpoint

A newcomer is a client that has never taken part, such as an unseen one (`evaluation.unseen`). It is tested after

    client = begin_as_newcomer(init_client, down);  client = train_as_newcomer(client, down) some times;  adapt, predict

and nothing of it is kept or sent; `newcomer` says whether it trains.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.learning.client import ClientData
from pflmpi.learning.diagnostics import Diagnostic
from pflmpi.learning.personal import NotAModel, Personal, assemble
from pflmpi.learning.task import HOST, Task
from pflmpi.learning.training import Pass
from pflmpi.messages.kinds import Downlink, Mean, Messages, Own, Uplink
from pflmpi.rng import stream
from pflmpi.tree import Tree

TRAINED_PARTS = ("body", "head")  # of a model; its "stats" follow the forward passes


@dataclass(frozen=True)
class Newcomer:
    """How a client that has never taken part joins; it predicts like the others."""

    trains: bool  # whether it makes local updates; otherwise it predicts with what it receives


@dataclass(frozen=True)
class CannotJoin:
    """A client that has never taken part cannot predict."""

    why: str  # the reason, for the user


@dataclass(frozen=True)
class Round:
    """A round on the server.

    Attributes:
        number: counts from 1; 0 for the introduction.
        participants: [P] ascending ids of the clients that sent messages.
        seed: of the run.
    """

    number: int
    participants: np.ndarray
    seed: int

    def stream(self, purpose: str) -> np.random.Generator:
        """The server's generator for one purpose in this round."""
        return stream(self.seed, self.number, -1, purpose)


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """Base of all algorithms: a frozen record of hyperparameters with pure methods.

    The fields of a subclass are its hyperparameters and nothing else, so the object is its own configuration.
    All methods are pure functions of their arguments; a checkpoint is exactly what they return.

    Attributes:
        summary: one line for `pflmpi list`.
        paper: authors and where it appeared, for `pflmpi list`.
        predicts_with: names of downlink messages that `adapt` or `predict` reads.
        adapts_with: names of the passes that `adapt` reads; it gets no others.
        unlike_models: whether clients may have different bodies (the messages must still agree in shape).
        introduces: whether every client sends its uplink once before the first round, from `introduce`.
        draws_noise: whether the losses use `Batch.key`, by `pflmpi.learning.client.uniform`.
        measured: names of the trainings whose loss is reported as a client's training loss; () for all.
        partial_work: whether a client may take fewer steps of its pass than configured, because of a deadline.
        linear_head: whether it computes with the head's "weight" and "bias"; heads with more are then refused.
        frozen_head: whether it works with models whose head is not trained.
        personal_parts: whether `model.personal` says what stays with a client (`Task.personal`).
        search: by field, the range from which `pflmpi search` draws it, with "log" for a logarithmic scale.
        needs: by field, another field and those values of it with which the first has an effect; else it is refused.
        any_task: whether it works with labels that are not classes; all losses are `model_loss` or `task_loss` then.
    """

    summary: ClassVar[str]
    paper: ClassVar[str]
    predicts_with: ClassVar[tuple[str, ...]] = ()
    adapts_with: ClassVar[tuple[str, ...]] = ()
    unlike_models: ClassVar[bool] = False
    introduces: ClassVar[bool] = False
    draws_noise: ClassVar[bool] = False
    measured: ClassVar[tuple[str, ...]] = ()
    partial_work: ClassVar[bool] = True
    linear_head: ClassVar[bool] = False
    frozen_head: ClassVar[bool] = False
    personal_parts: ClassVar[bool] = False
    search: ClassVar[Mapping[str, tuple[float, float] | tuple[float, float, str]]] = {}
    needs: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    any_task: ClassVar[bool] = False

    @property
    def needs_whole_batch(self) -> bool:
        """Whether a loss is no mean over the samples of a batch, so that `training.micro_batch` is refused."""
        return False

    def without_effect(self) -> Mapping[str, tuple[Any, ...]]:
        """The entries of `needs` for the fields that have no effect with this object's values."""
        return {field: need for field, need in self.needs.items() if getattr(self, need[0]) not in need[1:]}

    def check(self, task: Task, participants: int) -> None:
        """Raise `ConfigError` for hyperparameters that cannot work with this task; `participants` is P."""
        return None

    def uplink(self, task: Task) -> Mapping[str, Uplink]:
        """What a participant sends, by name."""
        return {}

    def downlink(self, task: Task) -> Mapping[str, Downlink]:
        """What a client receives, by name."""
        return {}

    def passes(self, task: Task, round: int) -> Mapping[str, Pass]:
        """The shuffled passes of a client over its data in a round, by name."""
        return {"train": Pass()}

    def trainings(self, task: Task) -> Mapping[str, Tree]:
        """Templates of what a client trains in a round, by the name given to `train` or `Phase`.

        With `training.keep_optimizer` the optimizer state of each is kept; `{}` if that is not possible.
        """
        return {"train": only(task.like(), TRAINED_PARTS)}

    def init_server(self, task: Task) -> Tree:
        """The server's state before the first round."""
        return {}

    def init_client(self, task: Task) -> Tree:
        """A client's initial state, `{}` if it keeps nothing; called once for all clients.

        With `training.init: per_client` it is called for each client, with a task whose `init()` is that client's. If
        the state depends on the client otherwise, define `init_client(self, task, client)`, called for each.
        """
        return {}

    def init_received(self, task: Task) -> Messages:
        """A client's kept `Own` messages before it takes part; has the two forms of `init_client`."""
        return {}

    def publish(self, task: Task, server: Tree, receivers: np.ndarray) -> Messages:
        """The messages to clients, except kept ones; `Own` messages have one row per receiver, in order.

        The bits of a row must not depend on the other receivers.
        """
        return {}

    def introduce(self, task: Task, client: Tree, data: ClientData) -> Messages:
        """A client's messages before the first round; `data` has no passes."""
        raise NotImplementedError

    @abstractmethod
    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        """The new state of ONE client and its messages; no client axis, no randomness."""

    def server_update(self, task: Task, server: Tree, up: Messages, round: Round) -> Tree:
        """The new server state, from the folded uplinks of the participants."""
        return server

    def answer(self, task: Task, server: Tree, up: Messages, round: Round) -> Messages:
        """The kept `Own` messages [P, ...] to the participants; called with the arguments of `server_update`, first."""
        raise NotImplementedError

    def adapt(self, task: Task, client: Tree, down: Messages, data: ClientData) -> Tree:
        """The client state for evaluation, which is not kept; `data` has the passes of `adapts_with`."""
        return client

    def newcomer(self, task: Task) -> Newcomer | CannotJoin:
        """How a newcomer joins: by default it trains if clients keep a state.

        If there are `Own` messages that are not kept, it cannot join without `publish_to_newcomers`.
        """
        down = self.downlink(task)
        own = [name for name, kind in down.items() if isinstance(kind, Own) and not kind.kept]
        if own and type(self).publish_to_newcomers is Algorithm.publish_to_newcomers:
            what = f"{type(self).__name__} sends every client its own {' and '.join(own)}"
            return CannotJoin(f"{what}, and does not say what a newcomer receives (publish_to_newcomers)")
        return Newcomer(trains=any(tree.leaves(initial_client(self, task.replace(device=HOST), 0))))

    def publish_to_newcomers(self, task: Task, server: Tree, newcomers: np.ndarray) -> Messages:
        """The messages to newcomers; `Own` ones have one row per newcomer, whose ids are N and above."""
        return self.publish(task, server, newcomers[:0])

    def begin_as_newcomer(self, task: Task, client: Tree, down: Messages) -> Tree:
        """The initial state of ONE newcomer; by default its `init_client`, which is given as `client`."""
        return client

    def train_as_newcomer(self, task: Task, client: Tree, down: Messages, data: ClientData) -> Tree:
        """The state of ONE newcomer after a local update; by default that of `client_update`."""
        return self.client_update(task, client, down, data)[0]

    @abstractmethod
    def personal(self, task: Task) -> Personal:
        """The description of the model with which a client predicts; stored in every checkpoint."""

    def predict(self, task: Task, client: Tree, down: Messages, x: Tensor) -> Tensor:
        """The scores [B, K] of the personal model for prepared images x [B, C, H, W]."""
        personal = self.personal(task)
        assert not isinstance(personal, NotAModel), f"{type(self).__name__} predicts with no model: it needs `predict`"
        return task.predict(assemble(personal, client, down), x)

    def after_training(self, task: Task, down: Messages, up: Messages) -> Messages:
        """Replaces `down` to predict with the model right after local training, before the server's update.

        All messages have an axis of clients, [m, ...]. By default those sent to be averaged replace the received ones
        of the same name; changes are added to these where their form is the same.
        """
        means = {name: kind for name, kind in self.uplink(task).items() if isinstance(kind, Mean) and name in down}
        results = dict(down)
        for name, kind in means.items():
            if not kind.is_change:
                results[name] = up[name]
            elif not tree.differences(up[name], down[name]):
                results[name] = tree.map(torch.add, down[name], up[name])
        return results

    def diagnostics(self, task: Task) -> Mapping[str, Diagnostic]:
        """Further values worth reporting, by name; stored in every checkpoint and drawn by kind."""
        return {}

    def diagnose(self, task: Task, server: Tree, up: Messages, round: Round) -> Mapping[str, Tensor]:
        """Values of diagnostics that are in no state, computed every round with the arguments of `server_update`."""
        return {}


def training_passes(algorithm: Algorithm, task: Task, round: int) -> dict[str, Pass]:
    """The passes of a local update over the samples that a client trains on."""
    passes = algorithm.passes(task, round).items()
    return {name: length for name, length in passes if length.side == "rest" and name not in algorithm.adapts_with}


def only(model: Tree, names: tuple[str, ...]) -> Tree:
    """Those of the named parts that a tree has."""
    return {name: model[name] for name in names if name in model}


def depends_on_client(algorithm: Algorithm, task: Task) -> bool:
    """Whether initial states or kept messages differ between clients."""
    methods = (algorithm.init_client, algorithm.init_received)
    return task.init_per_client or any(_takes_client(method) for method in methods)


def initial_client(algorithm: Algorithm, task: Task, client: int) -> Tree:
    """A client's state before the first round, by either form of `init_client`."""
    return algorithm.init_client(*_init_arguments(algorithm.init_client, task, client))


def initial_received(algorithm: Algorithm, task: Task, client: int) -> Messages:
    """A client's kept `Own` messages before the first round, by either form of `init_received`."""
    return algorithm.init_received(*_init_arguments(algorithm.init_received, task, client))


def _init_arguments(method: Callable[..., object], task: Task, client: int) -> tuple[Any, ...]:
    task = task.of_client(client)
    return (task, client) if _takes_client(method) else (task,)


def _takes_client(method: Callable[..., object]) -> bool:
    return len(inspect.signature(method).parameters) > 1
