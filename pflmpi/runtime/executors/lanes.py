"""Many clients in one vmapped call: the executor for small models, whose operations cost more than their arithmetic."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.learning.client import ClientData
from pflmpi.learning.training import Pass
from pflmpi.messages.kinds import Messages
from pflmpi.runtime.contract import calling, check_scores, check_state
from pflmpi.runtime.executors.base import Executor, to_host
from pflmpi.runtime.executors.batches import LaneBatches, LaneTensors, in_order, lane_tensors
from pflmpi.tree import Tree

_TRAIN = "/train"  # no pass has a slash in its name


class Lanes(Executor):
    """All clients of a group in one vmapped call; shorter lanes are padded and masked."""

    def update(self, clients: np.ndarray, states: Tree, down: Messages, round: int) -> tuple[Tree, Messages]:
        passes = self.passes(clients, round)
        new, up = self._with_data(self.algorithm.client_update, clients, states, (down,), round, passes)
        check_state(self.algorithm, "client_update", new, states)
        return tree.to_host(new), to_host(up)

    def introduce(self, clients: np.ndarray, states: Tree) -> Messages:
        return to_host(self._with_data(self.algorithm.introduce, clients, states, (), 0, {}))

    def evaluate(self, clients: np.ndarray, states: Tree, down: Messages, round: int) -> np.ndarray:
        task, device = self.task(clients).replace(batched=True), self.pool.images.device
        state, received = tree.to(states, device), _on(down, device)
        if self.adapts:
            passes = self.passes_to_adapt(clients, round)
            state = self._with_data(self.algorithm.adapt, clients, states, (down,), round, passes)
        tests = lane_tensors(self.pool, [in_order(self.federation.test[client], self.eval_batch) for client in clients])

        def right(state: Tree, received: Messages, images: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
            scores = self.algorithm.predict(task, state, received, task.prepare(images))
            check_scores(self.algorithm, scores, len(images), task.num_classes)
            return ((scores.argmax(1) == labels) & (weight > 0)).sum()

        correct = torch.zeros(len(clients), dtype=torch.int64, device=device)
        with torch.no_grad(), calling(self.algorithm, "predict", round, clients.tolist()):
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
        lanes = {name: self._lanes(clients, states, round, name, length) for name, length in passes.items()}
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
        with calling(self.algorithm, method.__name__, round, clients.tolist()):
            return torch.func.vmap(one)(tree.to(states, device), there, tensors, drawn, self.class_counts(clients))

    def _lanes(
        self, clients: np.ndarray, states: Tree, round: int, name: str, length: Pass
    ) -> tuple[LaneTensors, Tensor | None]:
        rows = [tree.row(states, lane) if length.times else {} for lane in range(len(clients))]
        orders = [self.order(int(each), round, name, length, row) for each, row in zip(clients, rows, strict=True)]
        one = lane_tensors(self.pool, orders)
        keys = [self.keys(int(client), round, name, one.labels.shape[1]) for client in clients]
        return one, torch.stack(keys) if self.algorithm.draws_noise else None  # type: ignore[arg-type]


def _on(down: Messages, device: torch.device) -> Messages:
    return {name: tree.to(value, device) for name, value in down.items()}
