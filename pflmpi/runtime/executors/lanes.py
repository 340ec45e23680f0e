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
from pflmpi.learning.training import Pass
from pflmpi.messages.kinds import Messages, as_messages
from pflmpi.models.base import Architecture
from pflmpi.runtime.contract import calling, check_scores, given
from pflmpi.runtime.executors.base import TRAIN, Executor, LocalUpdate
from pflmpi.runtime.executors.batches import (
    LaneBatches,
    LanePass,
    gather_images,
    gather_in_lane,
    in_order,
    lane_pass,
    steps_at_once,
)
from pflmpi.runtime.executors.transfers import Update, download_all, download_update, upload
from pflmpi.runtime.measures import Counts, counts
from pflmpi.tree import Tree


@dataclass(frozen=True)
class Lanes(Executor):
    """All clients of a group in one vmapped call; shorter lanes are padded and masked."""

    def local_update(
        self, method: LocalUpdate, clients: np.ndarray, states: Tree, down: Messages, round: int
    ) -> Callable[[], Update]:
        passes, one = self.passes(clients, round), self.of_one_client(method)
        found = self._with_data(one, clients, states, (down,), round, passes)
        return download_update(found, self.kept_on_device(self.task(clients)), self.device)

    def introduce(self, clients: np.ndarray, states: Tree) -> Messages:
        return as_messages(tree.to_host(self._with_data(self.algorithm.introduce, clients, states, (), 0, {})))

    def evaluate(self, clients: np.ndarray, states: Tree, down: Messages, round: int) -> Callable[[], Counts]:
        task = self.task(clients).replace(batched=True)
        whole = lane_pass([in_order(self.test_samples(client), self.eval_batch) for client in clients])
        sent: Tree = {"state": {} if self.adapts else states, "down": {**down}, "tests": whole.places}
        there = upload(sent, self.device)
        state, received = tree.part(there, "state"), as_messages(tree.part(there, "down"))
        if self.adapts:
            passes = self.passes_to_adapt(clients, round)
            state = self._with_data(self.algorithm.adapt, clients, states, (received,), round, passes)
        tests = gather_images(self.pool, tree.leaf(tree.part(there, "tests"), "index"))

        def predict(lane: Tree) -> Tree:
            images = tree.leaf(lane, "images")
            received = as_messages(tree.part(lane, "down"))
            scores = self.algorithm.predict(task, tree.part(lane, "state"), received, task.prepare(images))
            check_scores(self.algorithm, scores, len(images), task.num_classes)
            return {"scores": scores}

        scores = []
        called = calling(self.algorithm, "predict", round, clients.tolist(), in_lanes=True)
        with torch.no_grad(), called:
            for step in range(tests.shape[1]):
                lanes: Tree = {"state": state, "down": {**received}, "images": tests[:, step]}
                scores.append(tree.leaf(_in_lanes(predict, lanes), "scores"))
        if not scores:
            return lambda: Counts.none(self.federation.test_class_counts[clients])
        done = download_all(scores, self.device)
        real = tree.leaf(whole.places, "weight").flatten(1) > 0

        return lambda: counts(self.federation, clients, torch.stack(done(), 1).flatten(1, 2)[real])  # of [m, S B, K]

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
        task = self.task(clients).replace(batched=True)
        lanes = {name: self._lanes(clients, states, round, name, length) for name, length in passes.items()}
        if task.architecture.has_batch_norm:
            self._refuse_single(method.__name__, clients, round, lanes.values())
        lanes[TRAIN] = lane_pass([in_order(self.train_samples(client), self.eval_batch) for client in clients])
        by_client, decay = task.training.decay_by == "participations", self.decay(clients, round)
        sent: Tree = {
            "state": states,
            "received": {str(place): {**down} for place, down in enumerate(received)},
            "passes": {name: one.places for name, one in lanes.items()},
            "counts": self.class_counts(clients),
            "decay": torch.from_numpy(decay.astype(np.float32)) if by_client else torch.zeros(len(clients)),
        }
        there = upload(sent, self.device)
        smoothing = {name: self.smoothing(passes[name]) if name in passes else 0.0 for name in lanes}
        change = self.transform

        def batches(name: str, of: Tree) -> LaneBatches:
            index, weight = tree.leaf(of, "index"), tree.leaf(of, "weight")
            keys, draws = (tree.leaf(of, each) if each in of else None for each in ("keys", "draws"))
            gather, whole = functools.partial(gather_in_lane, self.pool, index), lanes[name]
            at_once = steps_at_once(self.pool, tree.leaf(whole.places, "index"))
            given = task, gather, weight, whole.full_steps, at_once, keys
            return LaneBatches(*given, smoothing[name], change, draws, whole.full)

        def one(lane: Tree) -> Tree:
            mine = {name: batches(name, tree.part(tree.part(lane, "passes"), name)) for name in lanes}
            own, factor = mine.pop(TRAIN), tree.leaf(lane, "decay") if by_client else float(decay[0])
            counts, down = tree.leaf(lane, "counts"), as_messages(tree.part(lane, "received")).values()
            data = ClientData(Passes(mine), own, counts, task.training.lr * factor, round, factor)
            found: Tree = method(task, tree.part(lane, "state"), *map(as_messages, down), data)
            return found

        down = as_messages(tree.part(tree.part(there, "received"), "0")) if received else {}
        reads = given(tree.part(there, "state"), down, tree.leaf(there, "counts"))
        called = calling(self.algorithm, method.__name__, round, clients.tolist(), in_lanes=True, reads=reads)
        with called:
            return _in_lanes(one, there)

    def _lanes(self, clients: np.ndarray, states: Tree, round: int, name: str, length: Pass) -> LanePass:
        rows = [tree.row(states, lane) if length.times else {} for lane in range(len(clients))]
        one = lane_pass(
            [self.order(int(each), round, name, length, row) for each, row in zip(clients, rows, strict=True)]
        )
        steps, drawn = tree.leaf(one.places, "index").shape[1], {}
        if self.draws_noise:
            drawn["keys"] = torch.stack([self.keys(int(client), round, name, steps) for client in clients])
        if self.transforms(length):
            each = [self.keys(int(client), round, name, steps, "transform") for client in clients]
            drawn["draws"] = torch.stack(each)
        return LanePass({**one.places, **drawn}, one.full_steps, one.full)

    def _refuse_single(self, method: str, clients: np.ndarray, round: int, passes: Iterable[LanePass]) -> None:
        """Let a model refuse batches of one sample, as it does in a loop; in a lane it does not see them."""
        task = self.task(clients)
        for one in passes:
            alone = (tree.leaf(one.places, "weight").sum(-1) == 1).any(-1).numpy()
            if alone.any():
                with calling(self.algorithm, method, round, [int(clients[alone][0])]):
                    _train_on_one(task.architecture)


def _in_lanes(method: Callable[[Tree], Tree], lanes: Tree) -> Tree:
    """What a method of one lane gives for trees [m, ...]; torch takes much longer than this to take them apart."""
    structure: Tree = {}

    def flat(*leaves: Tensor) -> tuple[Tensor, ...]:
        structure.update(method(_filled(lanes, leaves)))
        return tuple(leaf for _, leaf in tree.leaves(structure))

    return _filled(structure, torch.func.vmap(flat)(*(leaf for _, leaf in tree.leaves(lanes))))


def _filled(like: Tree, leaves: Iterable[Tensor]) -> Tree:
    """A tree with the given leaves, in order."""
    following = iter(leaves)
    return tree.map(lambda _: next(following), like)


@functools.cache
def _train_on_one(architecture: Architecture) -> None:
    """Raise what a model raises when it is trained on one sample."""
    model: Tree = {**architecture.init(np.random.default_rng(0)), "noise": {"key": torch.tensor(0)}}
    architecture.features(model, torch.zeros(1, *architecture.shape), training=True)
