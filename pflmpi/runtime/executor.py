"""How a rank computes its groups: client by client (`loop`) or many in one vmapped call (`lanes`)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.algorithms.base import Algorithm
from pflmpi.data.federation import Federation
from pflmpi.learning.client import ClientData
from pflmpi.learning.task import Task
from pflmpi.learning.training import Pass, batch_order, samples_of
from pflmpi.messages.kinds import Messages
from pflmpi.rng import stream
from pflmpi.runtime.batches import ClientBatches, LaneBatches, LaneTensors, Pool, in_order, lane_tensors
from pflmpi.tree import Tree


@dataclass(frozen=True)
class Executor(ABC):
    """What a rank needs to compute clients; the subclasses say how it computes them.

    Attributes:
        algorithm: the algorithm.
        tasks: one task per cohort, on the device of the rank.
        cohort: [N] the cohort of each client.
        federation: who holds which samples.
        pool: the samples.
        eval_batch: samples per forward pass outside training.
    """

    algorithm: Algorithm
    tasks: tuple[Task, ...]
    cohort: np.ndarray
    federation: Federation
    pool: Pool
    eval_batch: int

    @abstractmethod
    def update(self, clients: np.ndarray, states: Tree, down: Messages, round: int) -> tuple[Tree, Messages]:
        """Return new states and uplinks with a leading client axis, for the clients of one group.

        Args:
            clients: [m] ids, of one cohort.
            states: tree of [m, ...] on the host.
            down: messages with a leading axis m, on the host.
            round: counts from 1.
        """

    @abstractmethod
    def evaluate(self, clients: np.ndarray, states: Tree, down: Messages, round: int) -> np.ndarray:
        """Return [m] int64: how many test samples each client's personal model gets right."""

    def task(self, clients: np.ndarray) -> Task:
        """Return the task of a group."""
        return self.tasks[int(self.cohort[clients[0]])]

    @abstractmethod
    def introduce(self, clients: np.ndarray, states: Tree) -> Messages:
        """Return the introductions, with a leading client axis, of the clients of one group; see `update`."""

    def passes(self, clients: np.ndarray, round: int) -> dict[str, Pass]:
        """Return the passes that the clients of a group train with."""
        return dict(self.algorithm.passes(self.task(clients), round))

    def passes_to_adapt(self, clients: np.ndarray, round: int) -> dict[str, Pass]:
        """Return the passes that the clients of a group adapt with."""
        return {name: one for name, one in self.passes(clients, round).items() if name in self.algorithm.adapts_with}

    def order(self, client: int, round: int, name: str, length: Pass) -> list[np.ndarray]:
        """Return the sample indices of every batch of one pass of a client in a round."""
        task = self.tasks[self.cohort[client]]
        samples = self.federation.train[client]
        if length.held_out:
            samples = samples_of(samples, length, stream(task.seed, 0, client, "held out"))
        rng = stream(task.seed, round, client, f"batches/{name}")
        return [samples[batch] for batch in batch_order(rng, len(samples), task.training, length)]

    def keys(self, client: int, round: int, name: str, steps: int) -> Tensor | None:
        """Return [steps] int64, one key for each batch of a pass, where the algorithm draws noise."""
        if not self.algorithm.draws_noise:
            return None
        rng = stream(self.tasks[0].seed, round, client, f"noise/{name}")
        return torch.from_numpy(rng.integers(-(2**63), 2**63, steps, np.int64)).to(self.pool.images.device)

    def class_counts(self, clients: np.ndarray) -> Tensor:
        """Return [m, K] float32."""
        return torch.from_numpy(self.federation.class_counts[clients].astype(np.float32)).to(self.pool.images.device)

    @property
    def adapts(self) -> bool:
        """Whether evaluation is preceded by an adaptation step."""
        return type(self.algorithm).adapt is not Algorithm.adapt


class Loop(Executor):
    """Client by client."""

    def _data(self, client: int, round: int, passes: Mapping[str, Pass]) -> ClientData:
        task = self.tasks[self.cohort[client]]
        orders = {name: self.order(client, round, name, length) for name, length in passes.items()}
        return ClientData(
            passes={
                name: ClientBatches(task, self.pool, order, self.keys(client, round, name, len(order)))
                for name, order in orders.items()
            },
            train=ClientBatches(task, self.pool, in_order(self.federation.train[client], self.eval_batch)),
            class_counts=self.class_counts(np.array([client]))[0],
            learning_rate=task.training.learning_rate(round),
            round=round,
        )

    def update(self, clients: np.ndarray, states: Tree, down: Messages, round: int) -> tuple[Tree, Messages]:
        task, device, passes = self.task(clients), self.pool.images.device, self.passes(clients, round)
        results = [
            self.algorithm.client_update(
                task,
                tree.to(tree.row(states, i), device),
                _messages(down, i, device),
                self._data(int(client), round, passes),
            )
            for i, client in enumerate(clients)
        ]
        new = tree.stack([state for state, _ in results])
        up = {name: tree.stack([messages[name] for _, messages in results]) for name in results[0][1]}
        return tree.to_host(new), _to_host(up)

    def introduce(self, clients: np.ndarray, states: Tree) -> Messages:
        task, device = self.task(clients), self.pool.images.device
        ups = [
            self.algorithm.introduce(task, tree.to(tree.row(states, i), device), self._data(int(client), 0, {}))
            for i, client in enumerate(clients)
        ]
        return {name: tree.to_host(tree.stack([up[name] for up in ups])) for name in ups[0]}

    def evaluate(self, clients: np.ndarray, states: Tree, down: Messages, round: int) -> np.ndarray:
        task, device, passes = self.task(clients), self.pool.images.device, self.passes_to_adapt(clients, round)
        correct = np.zeros(len(clients), np.int64)
        for i, client in enumerate(clients):
            state, received = tree.to(tree.row(states, i), device), _messages(down, i, device)
            if self.adapts:
                state = self.algorithm.adapt(task, state, received, self._data(int(client), round, passes))
            right = torch.zeros((), dtype=torch.int64, device=device)
            with torch.no_grad():
                for batch in ClientBatches(task, self.pool, in_order(self.federation.test[client], self.eval_batch)):
                    scores = self.algorithm.predict(task, state, received, batch.x)
                    right += (scores.argmax(1) == batch.y).sum()
            correct[i] = int(right)
        return correct


class Lanes(Executor):
    """All clients of a group in one vmapped call; shorter lanes are padded and masked."""

    def update(self, clients: np.ndarray, states: Tree, down: Messages, round: int) -> tuple[Tree, Messages]:
        passes = self.passes(clients, round)
        new, up = self._with_data(self.algorithm.client_update, clients, states, (down,), round, passes)
        return tree.to_host(new), _to_host(up)

    def introduce(self, clients: np.ndarray, states: Tree) -> Messages:
        return _to_host(self._with_data(self.algorithm.introduce, clients, states, (), 0, {}))

    def evaluate(self, clients: np.ndarray, states: Tree, down: Messages, round: int) -> np.ndarray:
        task, device = self.task(clients).replace(batched=True), self.pool.images.device
        state, received = tree.to(states, device), _on(down, device)
        if self.adapts:
            passes = self.passes_to_adapt(clients, round)
            state = self._with_data(self.algorithm.adapt, clients, states, (down,), round, passes)
        tests = lane_tensors(self.pool, [in_order(self.federation.test[client], self.eval_batch) for client in clients])

        def right(state: Tree, received: Messages, images: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
            scores = self.algorithm.predict(task, state, received, task.prepare(images))
            return ((scores.argmax(1) == labels) & (weight > 0)).sum()

        correct = torch.zeros(len(clients), dtype=torch.int64, device=device)
        with torch.no_grad():
            for step in range(tests.labels.shape[1]):
                batch = (tests.images[:, step], tests.labels[:, step], tests.weight[:, step])
                correct += torch.func.vmap(right)(state, received, *batch)
        return correct.cpu().numpy()

    def _with_data(
        self,
        method: Callable[..., Any],
        clients: np.ndarray,
        states: Tree,
        received: tuple[Messages, ...],
        round: int,
        passes: Mapping[str, Pass],
    ) -> Any:
        """Call a method of the algorithm (task, client, *received, data) for all clients at once."""
        task, device = self.task(clients).replace(batched=True), self.pool.images.device
        lanes = {name: self._lanes(clients, round, name, length) for name, length in passes.items()}
        whole = [in_order(self.federation.train[client], self.eval_batch) for client in clients]
        lanes[_TRAIN] = lane_tensors(self.pool, whole), None
        tensors = {name: (one.images, one.labels, one.weight) for name, (one, _) in lanes.items()}
        drawn = {name: keys for name, (_, keys) in lanes.items() if keys is not None}
        fixed = {name: (one.full_steps, one.together) for name, (one, _) in lanes.items()}

        def one(
            state: Tree,
            received: tuple[Messages, ...],
            mine: dict[str, tuple[Tensor, Tensor, Tensor]],
            keys: dict[str, Tensor],
            counts: Tensor,
        ) -> Any:
            batches = {name: LaneBatches(task, *value, *fixed[name], keys.get(name)) for name, value in mine.items()}
            own = batches.pop(_TRAIN)
            data = ClientData(dict(batches), own, counts, task.training.learning_rate(round), round)
            return method(task, state, *received, data)

        there = tuple(_on(down, device) for down in received)
        return torch.func.vmap(one)(tree.to(states, device), there, tensors, drawn, self.class_counts(clients))

    def _lanes(self, clients: np.ndarray, round: int, name: str, length: Pass) -> tuple[LaneTensors, Tensor | None]:
        one = lane_tensors(self.pool, [self.order(int(client), round, name, length) for client in clients])
        keys = [self.keys(int(client), round, name, one.labels.shape[1]) for client in clients]
        return one, torch.stack(keys) if self.algorithm.draws_noise else None  # type: ignore[arg-type]


_TRAIN = "/train"  # no pass has a slash in its name

EXECUTORS: dict[str, type[Executor]] = {"loop": Loop, "lanes": Lanes}


def _to_host(messages: Messages) -> Messages:
    return {name: tree.to_host(value) for name, value in messages.items()}


def _on(down: Messages, device: torch.device) -> Messages:
    return {name: tree.to(value, device) for name, value in down.items()}


def _messages(down: Messages, index: int, device: torch.device) -> Messages:
    # No copy on the host: what is received is only read, and rows of packed buffers were aligned when unpacked.
    return {name: tree.map(lambda leaf: leaf[index].to(device), value) for name, value in down.items()}
