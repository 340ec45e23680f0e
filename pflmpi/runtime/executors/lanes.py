"""Many clients in one vmapped call, for small models, where launching an operation costs more than its arithmetic."""

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
        passes, update = self.passes(clients, round), self.wrap_method(method)
        results = self._call_in_lanes(update, clients, states, (down,), round, passes)
        return download_update(results, self.kept_on_device(self.task(clients)), self.device)

    def introduce(self, clients: np.ndarray, states: Tree) -> Messages:
        return as_messages(tree.to_host(self._call_in_lanes(self.algorithm.introduce, clients, states, (), 0, {})))

    def evaluate(self, clients: np.ndarray, states: Tree, down: Messages, round: int) -> Callable[[], Counts]:
        task = self.task(clients).replace(batched=True)
        tests = [self.federation.test[client] for client in clients]
        pool = self.pool.on_device(tests)
        padded = pad_lanes(pool, [split_in_order(samples, self.eval_batch) for samples in tests])
        uploaded = upload(
            {"state": {} if self.adapts else states, "down": {**down}, "tests": padded.places}, self.device
        )
        state, received = tree.part(uploaded, "state"), as_messages(tree.part(uploaded, "down"))
        if self.adapts:
            passes = self.passes_to_adapt(clients, round)
            state = self._call_in_lanes(self.algorithm.adapt, clients, states, (received,), round, passes)
        images = gather_images(pool, tree.leaf(tree.part(uploaded, "tests"), "index"))

        def predict(lane: Tree) -> Tree:
            images = tree.leaf(lane, "images")
            received = as_messages(tree.part(lane, "down"))
            scores = self.algorithm.predict(task, tree.part(lane, "state"), received, task.prepare(images))
            check_scores(self.algorithm, scores, len(images), task.score_shape)
            return {"scores": scores}

        scores = []
        ids, batch, first = clients.tolist(), self.eval_batch, self.first_test
        reads: dict[str, Tensor | Tree] = {"client": state, "down": {**received}}
        predicting = calling(self.algorithm, "predict", round, ids, True, reads=reads, batch=batch, first=first)
        with torch.no_grad(), predicting:
            for step in range(images.shape[1]):
                lanes: Tree = {"state": state, "down": {**received}, "images": images[:, step]}
                scores.append(tree.leaf(_in_lanes(predict, lanes), "scores"))
        if not scores:
            return lambda: self.untested(clients)
        wait = download_all(scores, self.device)
        is_real = tree.leaf(padded.places, "weight").flatten(1) > 0
        return lambda: count_results(
            self.federation, clients, torch.stack(wait(), 1).flatten(1, 2)[is_real], self.measures
        )

    def _call_in_lanes(
        self,
        method: Callable[..., Any],
        clients: np.ndarray,
        states: Tree,
        received: tuple[Messages, ...],
        round: int,
        passes: Mapping[str, Pass],
    ) -> Tree:
        """Call the algorithm's method(task, client, *received, data) for all clients at once."""
        task, train = self.task(clients).replace(batched=True), [self.federation.train[client] for client in clients]
        pool = self.pool.on_device(train)
        padded = {name: self._padded(pool, clients, states, round, name, length) for name, length in passes.items()}
        padded[TRAIN] = pad_lanes(pool, [split_in_order(samples, self.eval_batch) for samples in train])
        by_client, decay = task.training.decay_by == "participations", self.decay(clients, round)
        inputs: Tree = {
            "state": states,
            "received": {str(position): {**down} for position, down in enumerate(received)},
            "passes": {name: lane_pass.places for name, lane_pass in padded.items()},
            "counts": self.class_counts(clients),
            "decay": torch.from_numpy(decay.astype(np.float32)) if by_client else torch.zeros(len(clients)),
        }
        lanes = upload(inputs, self.device)

        def call(lane: Tree) -> Tree:
            places = tree.part(lane, "passes")
            batches = {
                name: self._batches(pool, task, lane_pass, tree.part(places, name), passes.get(name))
                for name, lane_pass in padded.items()
            }
            train, factor = batches.pop(TRAIN), tree.leaf(lane, "decay") if by_client else float(decay[0])
            counts, down = tree.leaf(lane, "counts"), as_messages(tree.part(lane, "received")).values()
            data = ClientData(Passes(batches), train, counts, task.training.lr * factor, round, factor)
            result: Tree = method(task, tree.part(lane, "state"), *map(as_messages, down), data)
            return result

        down = as_messages(tree.part(tree.part(lanes, "received"), "0")) if received else {}
        reads = collect_inputs(tree.part(lanes, "state"), down, tree.leaf(lanes, "counts"))
        name, ids, batch = method.__name__, clients.tolist(), self.batch
        first = self.first_test if name == "adapt" else 1
        with calling(self.algorithm, name, round, ids, in_lanes=True, reads=reads, batch=batch, first=first):
            return _in_lanes(call, lanes)

    def _batches(self, pool: Pool, task: Task, lane_pass: LanePass, places: Tree, length: Pass | None) -> LaneBatches:
        """The batches of one lane inside a vmapped call.

        Args:
            places: the lane's slice of `lane_pass.places`.
            length: None for the whole training split.
        """
        index = tree.leaf(places, "index")
        keys, draws = (tree.leaf(places, name) if name in places else None for name in ("keys", "draws"))
        return LaneBatches(
            task,
            functools.partial(gather_in_lane, pool, index),
            tree.leaf(places, "weight"),
            lane_pass.full_steps,
            count_steps_at_once(pool, tree.leaf(lane_pass.places, "index")),
            keys,
            0.0 if length is None else self.smoothing(length),
            self.transform,
            draws,
            index,
        )

    def _padded(self, pool: Pool, clients: np.ndarray, states: Tree, round: int, name: str, length: Pass) -> LanePass:
        """A pass of all clients, padded, with the keys of its batches."""
        orders = []
        for lane, client in enumerate(clients.tolist()):
            state = tree.row(states, lane) if length.times else {}
            orders.append(self.order(client, round, name, length, state))
        padded = pad_lanes(pool, orders)
        steps, keys = tree.leaf(padded.places, "index").shape[1], {}
        if self.draws_noise:
            keys["keys"] = torch.stack([self.keys(int(client), round, name, steps) for client in clients])
        if self.transforms(length):
            draws = [self.keys(int(client), round, name, steps, "transform") for client in clients]
            keys["draws"] = torch.stack(draws)
        return LanePass({**padded.places, **keys}, padded.full_steps)


def _in_lanes(method: Callable[[Tree], Tree], lanes: Tree) -> Tree:
    """Apply a method of one lane to trees [m, ...] by vmap, as flat tensors, because torch flattens trees slowly."""
    result: Tree = {}

    def apply(*leaves: Tensor) -> tuple[Tensor, ...]:
        result.update(method(_fill(lanes, leaves)))
        return tuple(leaf for _, leaf in tree.leaves(result))

    return _fill(result, torch.func.vmap(apply)(*(leaf for _, leaf in tree.leaves(lanes))))


def _fill(like: Tree, leaves: Iterable[Tensor]) -> Tree:
    """Returns a tree with the structure of `like` and the given leaves."""
    iterator = iter(leaves)
    return tree.map(lambda _: next(iterator), like)
