"""How a rank computes its units: client by client (`loop`) or many in one vmapped call (`lanes`)."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

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
        return self.tasks[self.cohort[clients[0]]]

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

    def _tensors(self, clients: np.ndarray, round: int) -> dict[str, dict[str, Tensor]]:
        orders = [self.orders(int(client), round) for client in clients]
        tensors = {f"pass/{name}": lane_tensors(self.pool, [order[name] for order in orders]) for name in orders[0]}
        tensors["train"] = lane_tensors(
            self.pool, [in_order(self.federation.train[client], self.eval_batch) for client in clients]
        )
        return tensors

    def _call(self, function: Callable[..., object], *trees: object) -> object:
        return torch.func.vmap(function, randomness="error")(*trees)

    def _data(self, task: Task, tensors: dict[str, dict[str, Tensor]], counts: Tensor, round: int) -> ClientData:
        batches = {name: LaneBatches(task, **value) for name, value in tensors.items()}
        return ClientData(
            passes={name[5:]: value for name, value in batches.items() if name != "train"},
            train=batches["train"],
            class_counts=counts,
            learning_rate=task.training.learning_rate(round),
        )

    def update(self, clients: np.ndarray, states: Tree, down: Messages, round: int) -> tuple[Tree, Messages]:
        task, device = self.task(clients).replace(batched=True), self.pool.images.device

        def one(
            state: Tree, received: Messages, tensors: dict[str, dict[str, Tensor]], counts: Tensor
        ) -> tuple[Tree, Messages]:
            return self.algorithm.client_update(task, state, received, self._data(task, tensors, counts, round))

        received = {name: tree.to(value, device) for name, value in down.items()}
        new, up = self._call(  # type: ignore[misc]
            one, tree.to(states, device), received, self._tensors(clients, round), self.class_counts(clients)
        )
        return tree.to_host(new), {name: tree.to_host(value) for name, value in up.items()}

    def evaluate(self, clients: np.ndarray, states: Tree, down: Messages, round: int) -> np.ndarray:
        task, device = self.task(clients).replace(batched=True), self.pool.images.device
        state = tree.to(states, device)
        received = {name: tree.to(value, device) for name, value in down.items()}
        counts = self.class_counts(clients)
        if self.adapts:

            def adapt(state: Tree, received: Messages, tensors: dict[str, dict[str, Tensor]], counts: Tensor) -> Tree:
                return self.algorithm.adapt(task, state, received, self._data(task, tensors, counts, round))

            state = self._call(adapt, state, received, self._tensors(clients, round), counts)  # type: ignore[assignment]
        tests = lane_tensors(self.pool, [in_order(self.federation.test[client], self.eval_batch) for client in clients])
        correct = torch.zeros(len(clients), dtype=torch.int64, device=device)

        def right(state: Tree, received: Messages, images: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
            scores = self.algorithm.predict(task, state, received, task.prepare(images))
            return ((scores.argmax(1) == labels) & (weight > 0)).sum()

        with torch.no_grad():
            for step in range(tests["labels"].shape[1]):
                batch = [tests[key][:, step] for key in ("images", "labels", "weight")]
                correct += self._call(right, state, received, *batch)  # type: ignore[operator]
        return correct.cpu().numpy()


EXECUTORS: dict[str, type[Workplace]] = {"loop": Loop, "lanes": Lanes}


def _messages(down: Messages, index: int, device: torch.device) -> Messages:
    # No copy on the host: what is received is only read, and rows of packed buffers were aligned when unpacked.
    return {name: tree.map(lambda leaf: leaf[index].to(device), value) for name, value in down.items()}
