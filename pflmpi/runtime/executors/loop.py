"""Clients one after another: the executor for models that cannot be batched over clients, and the plainest one."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from pflmpi import tree
from pflmpi.learning.client import ClientData, Passes
from pflmpi.learning.task import Task
from pflmpi.learning.training import Pass
from pflmpi.messages.kinds import Messages, as_messages
from pflmpi.runtime.contract import calling, given
from pflmpi.runtime.executors.base import TRAIN, Executor, LocalUpdate
from pflmpi.runtime.executors.batches import ClientBatches, in_order
from pflmpi.runtime.executors.transfers import Update, download_all, download_update, upload
from pflmpi.runtime.measures import Counts, counts, predictions
from pflmpi.tree import Tree

_NOTHING = np.empty(0, np.int64)


class Loop(Executor):
    """Client by client."""

    def _data(self, client: int, round: int, passes: Mapping[str, Pass], state: Tree) -> ClientData:
        task, decay = self.tasks[self.cohort[client]], float(self.decay(np.array([client]), round)[0])
        batches = {name: self.order(client, round, name, length, state) for name, length in passes.items()}
        drawn = batches if self.draws_noise else {}
        keys: Tree = {name: self.keys(client, round, name, len(order)) for name, order in drawn.items()}
        changed = {name: order for name, order in batches.items() if self.transforms(passes[name])}
        draws: Tree = {n: self.keys(client, round, n, len(order), "transform") for n, order in changed.items()}
        batches[TRAIN] = in_order(self.train_samples(client), self.eval_batch)
        counts = self.class_counts(np.array([client]))[0]
        there = upload({"orders": _joined(batches), "keys": keys, "draws": draws, "counts": counts}, self.device)
        orders, keys, draws = (tree.part(there, part) for part in ("orders", "keys", "draws"))
        ready = {
            name: ClientBatches(
                task,
                self.pool,
                tree.leaf(orders, name),
                [len(batch) for batch in order],
                tree.leaf(keys, name) if name in keys else None,
                self.smoothing(passes[name]) if name in passes else 0.0,
                self.transform,
                tree.leaf(draws, name) if name in draws else None,
            )
            for name, order in batches.items()
        }
        return ClientData(
            train=ready.pop(TRAIN),
            passes=Passes(ready),
            class_counts=tree.leaf(there, "counts"),
            learning_rate=task.training.lr * decay,
            round=round,
            decay=decay,
        )

    def local_update(
        self, method: LocalUpdate, clients: np.ndarray, states: Tree, down: Messages, round: int
    ) -> Callable[[], Update]:
        task, passes, one = self.task(clients), self.passes(clients, round), self.of_one_client(method)
        results: list[Tree] = []
        there = upload({"state": states, "down": {**down}}, self.device)
        for i, client in enumerate(clients):
            state, received = _row(tree.part(there, "state"), i), as_messages(_row(tree.part(there, "down"), i))
            data = self._data(int(client), round, passes, _row(states, i))
            with calling(
                self.algorithm, method.__name__, round, [client], reads=given(state, received, data.class_counts)
            ):
                results.append(one(task, state, received, data))
        return download_update(_stacked(results), self.kept_on_device(task), self.device)

    def introduce(self, clients: np.ndarray, states: Tree) -> Messages:
        task = self.task(clients)
        ups: list[Tree] = []
        there = upload(states, self.device)
        for i, client in enumerate(clients):
            state, data = _row(there, i), self._data(int(client), 0, {}, {})
            with calling(self.algorithm, "introduce", 0, [client], reads=given(state, {}, data.class_counts)):
                ups.append({**self.algorithm.introduce(task, state, data)})
        return as_messages(tree.to_host(_stacked(ups)))

    def adapted(self, client: int, state: Tree, down: Messages, round: int) -> Tree:
        """The state that a client is tested with after a round; both its own and what it received are on the host."""
        if not self.adapts:
            return state
        group = np.array([client])
        data = self._data(client, round, self.passes_to_adapt(group, round), state)
        there = upload({"state": state, "down": {**down}}, self.device)
        received = as_messages(tree.part(there, "down"))
        return self._adapted(self.task(group), client, tree.part(there, "state"), received, data)

    def _adapted(self, task: Task, client: int, state: Tree, received: Messages, data: ClientData) -> Tree:
        with calling(self.algorithm, "adapt", data.round, [client], reads=given(state, received, data.class_counts)):
            return self.algorithm.adapt(task, state, received, data)

    def evaluate(self, clients: np.ndarray, states: Tree, down: Messages, round: int) -> Callable[[], Counts]:
        task, passes, scores = self.task(clients), self.passes_to_adapt(clients, round), []
        tests = {str(client): in_order(self.test_samples(client), self.eval_batch) for client in clients}
        there = upload({"state": states, "down": {**down}, "tests": _joined(tests)}, self.device)
        for i, client in enumerate(clients):
            state, received = _row(tree.part(there, "state"), i), as_messages(_row(tree.part(there, "down"), i))
            if self.adapts:
                data = self._data(int(client), round, passes, _row(states, i))
                state = self._adapted(task, int(client), state, received, data)
            sizes = list(map(len, tests[str(client)]))
            batches = ClientBatches(task, self.pool, tree.leaf(tree.part(there, "tests"), str(client)), sizes)
            with calling(self.algorithm, "predict", round, [client], reads={"client": state, "down": {**received}}):
                scores += predictions(self.algorithm, task, state, received, batches)
        done = download_all(scores, self.device)
        return lambda: counts(self.federation, clients, torch.cat([torch.empty(0, task.num_classes), *done()]))


def _joined(batches: Mapping[str, Sequence[np.ndarray]]) -> Tree:
    """The sample indices of all batches of each pass, one after another."""
    return {name: torch.from_numpy(np.concatenate([_NOTHING, *order])) for name, order in batches.items()}


def _row(rows: Tree, index: int) -> Tree:
    """The row of one client; it is only read. The first one begins where all of them do, so it is aligned."""
    return tree.row(rows, index) if index else tree.map(lambda leaf: leaf[0], rows)


def _stacked(results: list[Tree]) -> Tree:
    """The results of all clients along a first axis."""
    return tree.stack(results) if len(results) > 1 else tree.map(lambda leaf: leaf.unsqueeze(0), results[0])
