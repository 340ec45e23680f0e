"""Many clients in one vmapped call: the executor for small models, whose operations cost more than their arithmetic."""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.learning.client import ClientData, Passes
from pflmpi.learning.task import Task
from pflmpi.learning.training import Pass
from pflmpi.messages.kinds import Messages, as_messages
from pflmpi.models.base import Architecture
from pflmpi.runtime.contract import calling, check_scores, collect_inputs
from pflmpi.runtime.counts import Counts, count_results
from pflmpi.runtime.executors.base import TRAIN, Executor, LocalUpdate
from pflmpi.runtime.executors.batches import (
    LaneBatches,
    LanePass,
    Pool,
    count_steps_at_once,
    gather_images,
    gather_in_lane,
    pad_lanes,
    split_in_order,
)
from pflmpi.runtime.executors.transfers import Update, download_all, download_update, upload
from pflmpi.tree import Tree


@dataclass(frozen=True)
class Lanes(Executor):
    """All clients of a group in one vmapped call; shorter lanes are padded and masked."""

    def local_update(
        self, method: LocalUpdate, clients: np.ndarray, states: Tree, down: Messages, round: int
    ) -> Callable[[], Update]:
        passes, update = self.passes(clients, round), self.of_one_client(method)
        results = self._with_data(update, clients, states, (down,), round, passes)
        return download_update(results, self.kept_on_device(self.task(clients)), self.device)

    def introduce(self, clients: np.ndarray, states: Tree) -> Messages:
        return as_messages(tree.to_host(self._with_data(self.algorithm.introduce, clients, states, (), 0, {})))

    def evaluate(self, clients: np.ndarray, states: Tree, down: Messages, round: int) -> Callable[[], Counts]:
        task = self.task(clients).replace(batched=True)
        tests = [self.federation.test[client] for client in clients]
        pool = self.pool.on_device(tests)
        whole = pad_lanes(pool, [split_in_order(samples, self.eval_batch) for samples in tests])
        sent: Tree = {"state": {} if self.adapts else states, "down": {**down}, "tests": whole.places}
        uploaded = upload(sent, self.device)
        state, received = tree.part(uploaded, "state"), as_messages(tree.part(uploaded, "down"))
        if self.adapts:
            passes = self.passes_to_adapt(clients, round)
            state = self._with_data(self.algorithm.adapt, clients, states, (received,), round, passes)
        images = gather_images(pool, tree.leaf(tree.part(uploaded, "tests"), "index"))

        def predict(lane: Tree) -> Tree:
            images = tree.leaf(lane, "images")
            received = as_messages(tree.part(lane, "down"))
            scores = self.algorithm.predict(task, tree.part(lane, "state"), received, task.prepare(images))
            check_scores(self.algorithm, scores, len(images), task.score_shape)
            return {"scores": scores}

        scores = []
        ids, batch, first = clients.tolist(), self.eval_batch, self.first_test
        predicting = calling(self.algorithm, "predict", round, ids, in_lanes=True, batch=batch, first=first)
        with torch.no_grad(), predicting:
            for step in range(images.shape[1]):
                lanes: Tree = {"state": state, "down": {**received}, "images": images[:, step]}
                scores.append(tree.leaf(_in_lanes(predict, lanes), "scores"))
        if not scores:
            return lambda: self.untested(clients)
        done = download_all(scores, self.device)
        real = tree.leaf(whole.places, "weight").flatten(1) > 0

        def finish() -> Counts:
            return count_results(self.federation, clients, torch.stack(done(), 1).flatten(1, 2)[real], self.measures)

        return finish

    def _with_data(
        self,
        method: Callable[..., Any],
        clients: np.ndarray,
        states: Tree,
        received: tuple[Messages, ...],
        round: int,
        passes: Mapping[str, Pass],
    ) -> Tree:
        """Call a method of the algorithm (task, client, *received, data) for all clients at once."""
        task, train = self.task(clients).replace(batched=True), [self.federation.train[client] for client in clients]
        pool = self.pool.on_device(train)
        padded = {name: self._padded(pool, clients, states, round, name, length) for name, length in passes.items()}
        if task.architecture.has_batch_norm:
            self._refuse_single(method.__name__, clients, round, padded.values())
        padded[TRAIN] = pad_lanes(pool, [split_in_order(samples, self.eval_batch) for samples in train])
        by_client, decay = task.training.decay_by == "participations", self.decay(clients, round)
        sent: Tree = {
            "state": states,
            "received": {str(place): {**down} for place, down in enumerate(received)},
            "passes": {name: of_lanes.places for name, of_lanes in padded.items()},
            "counts": self.class_counts(clients),
            "decay": torch.from_numpy(decay.astype(np.float32)) if by_client else torch.zeros(len(clients)),
        }
        lanes = upload(sent, self.device)

        def call(lane: Tree) -> Tree:
            ready = {
                name: self._batches(pool, task, of_lanes, tree.part(tree.part(lane, "passes"), name), passes.get(name))
                for name, of_lanes in padded.items()
            }
            train, factor = ready.pop(TRAIN), tree.leaf(lane, "decay") if by_client else float(decay[0])
            counts, down = tree.leaf(lane, "counts"), as_messages(tree.part(lane, "received")).values()
            data = ClientData(Passes(ready), train, counts, task.training.lr * factor, round, factor)
            result: Tree = method(task, tree.part(lane, "state"), *map(as_messages, down), data)
            return result

        down = as_messages(tree.part(tree.part(lanes, "received"), "0")) if received else {}
        reads = collect_inputs(tree.part(lanes, "state"), down, tree.leaf(lanes, "counts"))
        name, ids, batch = method.__name__, clients.tolist(), self.batch
        first = self.first_test if name == "adapt" else 1
        with calling(self.algorithm, name, round, ids, in_lanes=True, reads=reads, batch=batch, first=first):
            return _in_lanes(call, lanes)

    def _batches(self, pool: Pool, task: Task, of_lanes: LanePass, places: Tree, length: Pass | None) -> LaneBatches:
        """The batches of one lane of a pass, inside a vmapped call; `length` is None for the whole training split."""
        index = tree.leaf(places, "index")
        keys, draws = (tree.leaf(places, name) if name in places else None for name in ("keys", "draws"))
        return LaneBatches(
            task,
            functools.partial(gather_in_lane, pool, index),
            tree.leaf(places, "weight"),
            of_lanes.full_steps,
            count_steps_at_once(pool, tree.leaf(of_lanes.places, "index")),
            keys,
            0.0 if length is None else self.smoothing(length),
            self.transform,
            draws,
            of_lanes.full,
            index,
        )

    def _padded(self, pool: Pool, clients: np.ndarray, states: Tree, round: int, name: str, length: Pass) -> LanePass:
        """A pass of all clients, padded, with the keys of its batches."""
        rows = [tree.row(states, lane) if length.times else {} for lane in range(len(clients))]
        orders = (self.order(int(client), round, name, length, row) for client, row in zip(clients, rows, strict=True))
        of_lanes = pad_lanes(pool, [*orders])
        steps, drawn = tree.leaf(of_lanes.places, "index").shape[1], {}
        if self.draws_noise:
            drawn["keys"] = torch.stack([self.keys(int(client), round, name, steps) for client in clients])
        if self.transforms(length):
            keys = [self.keys(int(client), round, name, steps, "transform") for client in clients]
            drawn["draws"] = torch.stack(keys)
        return LanePass({**of_lanes.places, **drawn}, of_lanes.full_steps, of_lanes.full)

    def _refuse_single(self, method: str, clients: np.ndarray, round: int, passes: Iterable[LanePass]) -> None:
        """Let a model refuse batches of one sample, as it does in a loop; in a lane it does not see them."""
        task = self.task(clients)
        for of_lanes in passes:
            alone = (tree.leaf(of_lanes.places, "weight").sum(-1) == 1).any(-1).numpy()
            if alone.any():
                with calling(self.algorithm, method, round, [int(clients[alone][0])]):
                    _train_on_one(task.architecture)


def _in_lanes(method: Callable[[Tree], Tree], lanes: Tree) -> Tree:
    """Apply a method of one lane to trees [m, ...] by vmap, as flat tensors: torch takes long to flatten trees."""
    structure: Tree = {}

    def flat(*leaves: Tensor) -> tuple[Tensor, ...]:
        structure.update(method(_fill(lanes, leaves)))
        return tuple(leaf for _, leaf in tree.leaves(structure))

    return _fill(structure, torch.func.vmap(flat)(*(leaf for _, leaf in tree.leaves(lanes))))


def _fill(like: Tree, leaves: Iterable[Tensor]) -> Tree:
    """A tree with the given leaves, in order."""
    following = iter(leaves)
    return tree.map(lambda _: next(following), like)


@functools.cache
def _train_on_one(architecture: Architecture) -> None:
    """Raise what a model raises when it is trained on one sample."""
    model: Tree = {**architecture.init(np.random.default_rng(0)), "noise": {"key": torch.tensor(0)}}
    architecture.features(model, torch.zeros(1, *architecture.shape), training=True)
