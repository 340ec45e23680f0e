"""How a rank computes its units: client by client (`loop`) or many in one vmapped call (`lanes`)."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.algorithms.base import Algorithm, Messages
from pflmpi.data.federation import Federation
from pflmpi.local import ClientData
from pflmpi.rng import stream
from pflmpi.runtime.batches import ClientBatches, LaneBatches, Pool, in_order, lane_tensors
from pflmpi.task import Task
from pflmpi.training import batch_order
from pflmpi.tree import Tree


@dataclass(frozen=True)
class Workplace(ABC):
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
        """Return new states and uplinks with a leading client axis, for the clients of one unit.

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
        """Return the task of a unit."""
        return self.tasks[int(self.cohort[clients[0]])]

    def orders(self, client: int, round: int) -> dict[str, list[np.ndarray]]:
        """Return the sample indices of every batch of every pass of a client in a round."""
        task, samples = self.tasks[self.cohort[client]], self.federation.train[client]
        return {
            name: [
                samples[batch]
                for batch in batch_order(
                    stream(task.seed, round, client, f"batches/{name}"), len(samples), task.training, epochs
                )
            ]
            for name, epochs in self.algorithm.passes(task).items()
        }

    def class_counts(self, clients: np.ndarray) -> Tensor:
        """Return [m, K] float32."""
        return torch.from_numpy(self.federation.class_counts[clients].astype(np.float32)).to(self.pool.images.device)

    @property
    def adapts(self) -> bool:
        """Whether evaluation is preceded by an adaptation step."""
        return type(self.algorithm).adapt is not Algorithm.adapt


class Loop(Workplace):
    """Client by client."""

    def _data(self, client: int, round: int) -> ClientData:
        task = self.tasks[self.cohort[client]]
        return ClientData(
            passes={name: ClientBatches(task, self.pool, order) for name, order in self.orders(client, round).items()},
            train=ClientBatches(task, self.pool, in_order(self.federation.train[client], self.eval_batch)),
            class_counts=self.class_counts(np.array([client]))[0],
            learning_rate=task.training.learning_rate(round),
        )

    def update(self, clients: np.ndarray, states: Tree, down: Messages, round: int) -> tuple[Tree, Messages]:
        task, device = self.task(clients), self.pool.images.device
        results = [
            self.algorithm.client_update(
                task, tree.to(tree.row(states, i), device), _messages(down, i, device), self._data(int(client), round)
            )
            for i, client in enumerate(clients)
        ]
        new = tree.stack([state for state, _ in results])
        up = {name: tree.stack([messages[name] for _, messages in results]) for name in results[0][1]}
        return tree.to_host(new), {name: tree.to_host(value) for name, value in up.items()}

    def evaluate(self, clients: np.ndarray, states: Tree, down: Messages, round: int) -> np.ndarray:
        task, device = self.task(clients), self.pool.images.device
        correct = np.zeros(len(clients), np.int64)
        for i, client in enumerate(clients):
            state, received = tree.to(tree.row(states, i), device), _messages(down, i, device)
            if self.adapts:
                state = self.algorithm.adapt(task, state, received, self._data(int(client), round))
            right = torch.zeros((), dtype=torch.int64, device=device)
            with torch.no_grad():
                for batch in ClientBatches(task, self.pool, in_order(self.federation.test[client], self.eval_batch)):
                    scores = self.algorithm.predict(task, state, received, batch.x)
                    right += (scores.argmax(1) == batch.y).sum()
            correct[i] = int(right)
        return correct


class Lanes(Workplace):
    """All clients of a unit in one vmapped call; shorter lanes are padded and masked."""

    def update(self, clients: np.ndarray, states: Tree, down: Messages, round: int) -> tuple[Tree, Messages]:
        new, up = self._with_data(self.algorithm.client_update, clients, states, down, round)
        return tree.to_host(new), {name: tree.to_host(value) for name, value in up.items()}

    def evaluate(self, clients: np.ndarray, states: Tree, down: Messages, round: int) -> np.ndarray:
        task, device = self.task(clients).replace(batched=True), self.pool.images.device
        state, received = tree.to(states, device), _on(down, device)
        if self.adapts:
            state = self._with_data(self.algorithm.adapt, clients, states, down, round)
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
        self, method: Callable[..., Any], clients: np.ndarray, states: Tree, down: Messages, round: int
    ) -> Any:
        """Call a method of the algorithm (task, client, down, data) for all clients at once."""
        task, device = self.task(clients).replace(batched=True), self.pool.images.device
        orders = [self.orders(int(client), round) for client in clients]
        passes = {name: lane_tensors(self.pool, [order[name] for order in orders]) for name in orders[0]}
        train = lane_tensors(
            self.pool, [in_order(self.federation.train[client], self.eval_batch) for client in clients]
        )
        tensors = {name: (one.images, one.labels, one.weight) for name, one in {**passes, _TRAIN: train}.items()}
        fixed = {name: (one.full_steps, one.together) for name, one in {**passes, _TRAIN: train}.items()}

        def one(state: Tree, received: Messages, mine: dict[str, tuple[Tensor, Tensor, Tensor]], counts: Tensor) -> Any:
            batches = {name: LaneBatches(task, *value, *fixed[name]) for name, value in mine.items()}
            own = batches.pop(_TRAIN)
            data = ClientData(dict(batches), own, counts, task.training.learning_rate(round))
            return method(task, state, received, data)

        return torch.func.vmap(one)(tree.to(states, device), _on(down, device), tensors, self.class_counts(clients))


_TRAIN = "/train"  # no pass has a slash in its name

EXECUTORS: dict[str, type[Workplace]] = {"loop": Loop, "lanes": Lanes}


def _on(down: Messages, device: torch.device) -> Messages:
    return {name: tree.to(value, device) for name, value in down.items()}


def _messages(down: Messages, index: int, device: torch.device) -> Messages:
    # No copy on the host: what is received is only read, and rows of packed buffers were aligned when unpacked.
    return {name: tree.map(lambda leaf: leaf[index].to(device), value) for name, value in down.items()}
