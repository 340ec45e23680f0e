"""The one contract: what an algorithm is.

Over the whole run, the runtime does exactly this (see `runtime/rounds.py`):

    server = server_update(server, up of introduce over all clients)      only where the algorithm introduces
    down = publish(server)
    for each round:
        clients, up = client_update over the participants
        server = server_update(server, up);  down = publish(server), to each participant its answer(up)
        when due: evaluate (adapt, predict) on every client;  write the checkpoint

A newcomer is a client that has never taken part, such as an unseen one (`evaluation.unseen`). When one is tested,

    client = begin_as_newcomer(init_client, down);  client = train_as_newcomer(client, down) some times;  adapt, predict

and nothing of it is kept or sent; `newcomer` says which of this there is.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
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


@dataclass(frozen=True)
class Newcomer:
    """How a client that has never taken part joins; it predicts as the others do.

    Attributes:
        trains: whether it makes local updates; otherwise it predicts with what it receives.
    """

    trains: bool


@dataclass(frozen=True)
class CannotJoin:
    """A client that has never taken part cannot predict.

    Attributes:
        why: for the user.
    """

    why: str


@dataclass(frozen=True)
class Round:
    """A round as the server sees it.

    Attributes:
        number: counts from 1; 0 for the introduction.
        participants: [P] ascending ids of the clients whose messages have arrived.
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
        adapts_with: names of the passes that `adapt` reads; it is given no others.
        unlike_models: whether clients may have different bodies (the messages must still agree in shape).
        introduces: whether every client sends its uplink once before the first round, from `introduce`.
        draws_noise: whether the losses use `Batch.key`, by `pflmpi.learning.client.uniform`.
        measured: names of the trainings whose loss is the training loss of a client; () for all.
        partial_work: whether a client may take fewer steps of its pass than configured, as before a deadline.
        linear_head: whether it computes with the head's "weight" and "bias", so that heads which do more are refused.
        frozen_head: whether it has a meaning for models whose head is not trained.
        personal_parts: whether `model.personal` says what stays with a client (`Task.personal`).
        search: by field, from where to where `pflmpi search` draws it, and "log" where evenly by the logarithm.
        needs: by field, another field and the values of it without which the first has no effect (and is refused).
        any_task: whether it has a meaning for labels that are no classes, as its losses are `model_loss`, `task_loss`.
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

    def without_effect(self) -> Mapping[str, tuple[Any, ...]]:
        """What `needs` says of the fields that have no effect in this object."""
        return {field: needed for field, needed in self.needs.items() if getattr(self, needed[0]) not in needed[1:]}

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
        """The shuffled passes over its data that a client makes in a round, by name."""
        return {"train": Pass()}

    def trainings(self, task: Task) -> Mapping[str, Tree]:
        """Templates of what a client trains in a round, by the name given to `train` or `Phase`.

        With `training.keep_optimizer` the optimizer's state of each is kept; `{}` where that makes no sense.
        """
        return {"train": only(task.like(), ("body", "head"))}

    def init_server(self, task: Task) -> Tree:
        """The server's state before the first round."""
        return {}

    def init_client(self, task: Task) -> Tree:
        """What a client keeps between rounds, `{}` if nothing: called once, its result common to all clients.

        Under `training.init: per_client` it is called for each, with a task whose `init()` is that client's. Where the
        result depends on the client otherwise, the method is `init_client(self, task, client)`, called for each.
        """
        return {}

    def init_received(self, task: Task) -> Messages:
        """What a client has of kept `Own` messages before it takes part; it has the two forms of `init_client`."""
        return {}

    def publish(self, task: Task, server: Tree, receivers: np.ndarray) -> Messages:
        """What the clients receive, but for kept messages; `Own` ones have one row per receiver, in that order.

        The bits of a row must not depend on who else receives.
        """
        return {}

    def introduce(self, task: Task, client: Tree, data: ClientData) -> Messages:
        """What a client sends before the first round; `data` has no passes."""
        raise NotImplementedError

    @abstractmethod
    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        """The new state of ONE client and its uplink; no client axis, no randomness."""

    def server_update(self, task: Task, server: Tree, up: Messages, round: Round) -> Tree:
        """The new server state, from the folded uplinks of the participants."""
        return server

    def answer(self, task: Task, server: Tree, up: Messages, round: Round) -> Messages:
        """The kept `Own` messages [P, ...] to the participants; arguments as of `server_update`, which comes after."""
        raise NotImplementedError

    def adapt(self, task: Task, client: Tree, down: Messages, data: ClientData) -> Tree:
        """The client state to evaluate with; it is not kept. `data` has the passes of `adapts_with`."""
        return client

    def newcomer(self, task: Task) -> Newcomer | CannotJoin:
        """How a newcomer joins; by default it trains if clients keep anything; `Own` messages must be made for it."""
        down = self.downlink(task)
        own = [name for name, kind in down.items() if isinstance(kind, Own) and not kind.kept]
        if own and type(self).publish_to_newcomers is Algorithm.publish_to_newcomers:
            what = f"{type(self).__name__} sends every client its own {' and '.join(own)}"
            return CannotJoin(f"{what}, and does not say what a newcomer receives (publish_to_newcomers)")
        return Newcomer(trains=any(tree.leaves(initial_client(self, task.replace(device=HOST), 0))))

    def publish_to_newcomers(self, task: Task, server: Tree, newcomers: np.ndarray) -> Messages:
        """What newcomers receive; `Own` messages have one row per newcomer, whose ids are N and more."""
        return self.publish(task, server, newcomers[:0])

    def begin_as_newcomer(self, task: Task, client: Tree, down: Messages) -> Tree:
        """The state that ONE newcomer begins with; `client` is its `init_client`, which is the default."""
        return client

    def train_as_newcomer(self, task: Task, client: Tree, down: Messages, data: ClientData) -> Tree:
        """The state of ONE newcomer after a local update; by default as a participant's, whose message is dropped."""
        return self.client_update(task, client, down, data)[0]

    @abstractmethod
    def personal(self, task: Task) -> Personal:
        """How the model that a client predicts with is put together; stored in every checkpoint."""

    def predict(self, task: Task, client: Tree, down: Messages, x: Tensor) -> Tensor:
        """The scores [B, K] of the personal model for prepared images x [B, C, H, W]."""
        personal = self.personal(task)
        assert not isinstance(personal, NotAModel), f"{type(self).__name__} predicts with no model: it needs `predict`"
        return task.predict(assemble(personal, client, down), x)

    def after_training(self, task: Task, down: Messages, up: Messages) -> Messages:
        """What `predict` reads instead of `down` for the model that local training leaves, before the server answers.

        By default what is sent to be averaged takes the place of what was received under the same name.
        """
        sent = [name for name, kind in self.uplink(task).items() if isinstance(kind, Mean)]
        return {name: up[name] if name in sent else value for name, value in down.items()}

    def diagnostics(self, task: Task) -> Mapping[str, Diagnostic]:
        """What is worth looking at besides scores, by name; stored in every checkpoint and drawn by kind."""
        return {}

    def diagnose(self, task: Task, server: Tree, up: Messages, round: Round) -> Mapping[str, Tensor]:
        """Values of diagnostics that are in no state, computed every round; arguments as of `server_update`."""
        return {}


def training_passes(algorithm: Algorithm, task: Task, round: int) -> dict[str, Pass]:
    """The passes of a local update over the samples that a client trains on."""
    passes = algorithm.passes(task, round).items()
    return {name: length for name, length in passes if length.side == "rest" and name not in algorithm.adapts_with}


def only(model: Tree, names: tuple[str, ...]) -> Tree:
    """The named parts of a tree, those that it has."""
    return {name: model[name] for name in names if name in model}


def depends_on_client(algorithm: Algorithm, task: Task) -> bool:
    """Whether clients begin with states or kept messages of their own, as models and signatures say."""
    methods = (algorithm.init_client, algorithm.init_received)
    return task.init_per_client or any(_takes_client(method) for method in methods)


def initial_client(algorithm: Algorithm, task: Task, client: int) -> Tree:
    """What a client keeps before the first round, by `init_client` in either form."""
    return algorithm.init_client(*_arguments(algorithm.init_client, task, client))


def initial_received(algorithm: Algorithm, task: Task, client: int) -> Messages:
    """What a client has of kept `Own` messages before the first round, by `init_received` in either form."""
    return algorithm.init_received(*_arguments(algorithm.init_received, task, client))


def _arguments(method: Callable[..., object], task: Task, client: int) -> tuple[Any, ...]:
    return (task.of_client(client), client)[: 1 + _takes_client(method)]


def _takes_client(method: Callable[..., object]) -> bool:
    return len(inspect.signature(method).parameters) > 1
