"""Clients one after another: the executor for models that cannot be batched over clients, and the plainest one."""

from collections.abc import Mapping

import numpy as np
import torch

from pflmpi import tree
from pflmpi.learning.client import ClientData
from pflmpi.learning.training import Pass
from pflmpi.messages.kinds import Messages
from pflmpi.runtime.contract import calling, check_scores, check_state
from pflmpi.runtime.executors.base import Executor, to_host
from pflmpi.runtime.executors.batches import ClientBatches, in_order
from pflmpi.tree import Tree


class Loop(Executor):
    """Client by client."""

    def _data(self, client: int, round: int, passes: Mapping[str, Pass], state: Tree) -> ClientData:
        task = self.tasks[self.cohort[client]]
        orders = {name: self.order(client, round, name, length, state) for name, length in passes.items()}
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
        results = []
        for i, client in enumerate(clients):
            state, received = tree.to(tree.row(states, i), device), _messages(down, i, device)
            data = self._data(int(client), round, passes, state)
            with calling(self.algorithm, "client_update", round, [client]):
                new_state, up = self.algorithm.client_update(task, state, received, data)
            check_state(self.algorithm, "client_update", new_state, state)
            results.append((new_state, up))
        new = tree.stack([state for state, _ in results])
        sent = {name: tree.stack([messages[name] for _, messages in results]) for name in results[0][1]}
        return tree.to_host(new), to_host(sent)

    def introduce(self, clients: np.ndarray, states: Tree) -> Messages:
        task, device = self.task(clients), self.pool.images.device
        ups = []
        for i, client in enumerate(clients):
            with calling(self.algorithm, "introduce", 0, [client]):
                state, data = tree.to(tree.row(states, i), device), self._data(int(client), 0, {}, {})
                ups.append(self.algorithm.introduce(task, state, data))
        return {name: tree.to_host(tree.stack([up[name] for up in ups])) for name in ups[0]}

    def evaluate(self, clients: np.ndarray, states: Tree, down: Messages, round: int) -> np.ndarray:
        task, device, passes = self.task(clients), self.pool.images.device, self.passes_to_adapt(clients, round)
        correct = []
        for i, client in enumerate(clients):
            state, received = tree.to(tree.row(states, i), device), _messages(down, i, device)
            if self.adapts:
                with calling(self.algorithm, "adapt", round, [client]):
                    state = self.algorithm.adapt(task, state, received, self._data(int(client), round, passes, state))
            right = torch.zeros((), dtype=torch.int64, device=device)
            with torch.no_grad(), calling(self.algorithm, "predict", round, [client]):
                for batch in ClientBatches(task, self.pool, in_order(self.federation.test[client], self.eval_batch)):
                    scores = self.algorithm.predict(task, state, received, batch.x)
                    check_scores(self.algorithm, scores, len(batch.x), task.num_classes)
                    right += (scores.argmax(1) == batch.y).sum()
            correct.append(right)
        return torch.stack(correct).cpu().numpy()


def _messages(down: Messages, index: int, device: torch.device) -> Messages:
    # No copy on the host: what is received is only read, and rows of packed buffers were aligned when unpacked.
    return {name: tree.map(lambda leaf: leaf[index].to(device), value) for name, value in down.items()}
