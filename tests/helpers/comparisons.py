"""Models that differ, trees that are the same, and runs that must be: for tests of single algorithms."""

import dataclasses
import math
from typing import ClassVar

import numpy as np
import torch
from torch.nn import functional as F

import small_task
from pflmpi import tree
from pflmpi.models.base import Architecture
from pflmpi.testing.conformance import state_of as state_of


def model(seed):
    """A model of the small task with weights of its own."""
    generator = torch.Generator().manual_seed(seed)
    return tree.map(lambda leaf: torch.randn(leaf.shape, generator=generator) * 0.5, small_task.task().init())


def same(a, b):
    """Whether two trees have the same leaves, bit for bit."""
    return tree.differences(a, b) == [] and all(torch.equal(leaf, tree.at(b, path)) for path, leaf in tree.leaves(a))


def mean(trees):
    """The plain mean, in float64 between."""
    return tree.map(lambda rows: rows.double().mean(0).float(), tree.stack(trees))


def data_of(passes, lr=0.1, round=1, decay=1.0):
    """A client's data with the given passes; the rest of it is that of `small_task.batch(0)`."""
    data = small_task.data([small_task.batch(0)], lr)
    return dataclasses.replace(data, passes=dict(passes), round=round, decay=decay)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Normed(Architecture):
    """A linear layer, batch norm and a ReLU: the smallest model with statistics."""

    has_batch_norm: ClassVar[bool] = True

    @property
    def layers(self) -> tuple[str, ...]:
        return ("body", "head")

    def init(self, rng: np.random.Generator) -> tree.Tree:
        d = self.num_features
        sizes = math.prod(self.shape), self.num_classes
        weight, head = (torch.from_numpy(rng.normal(size=(rows, d)).astype(np.float32)) for rows in sizes)
        return {
            "body": {"weight": weight.mT.contiguous()},
            "head": {"weight": head, "bias": torch.zeros(self.num_classes)},
            "stats": {"mean": torch.zeros(d), "var": torch.ones(d)},
        }

    def features(self, params: tree.Tree, x: torch.Tensor, training: bool) -> torch.Tensor:
        z = x.flatten(1) @ tree.at(params, "body/weight").mT
        return F.batch_norm(z, tree.at(params, "stats/mean"), tree.at(params, "stats/var"), training=training).relu()


def with_batch_norm(**training):
    """The small task with a model that has batch norm."""
    architecture = Normed(
        name="normed", shape=small_task.SHAPE, num_classes=small_task.CLASSES, num_features=small_task.FEATURES
    )
    return dataclasses.replace(small_task.task(**training), architecture=architecture)


def check_padding(algorithm, client, down, names):
    """Check that a step of padding alone changes nothing in a lane, neither what is kept nor what is sent."""
    task = small_task.task(momentum=0.5, weight_decay=0.1).replace(batched=True)
    real, size = torch.ones(6), small_task.batch(0).y.shape[0]

    def update(client, down, weight):
        passes = {
            name: [
                small_task.padded(small_task.batch(place).x, small_task.batch(place).y, row) for row in weight.unbind(0)
            ]
            for place, name in enumerate(names)
        }
        return algorithm.client_update(task, client, down, data_of(passes))

    lane = tree.stack([{"client": client, "down": down}])
    results = [
        torch.func.vmap(update)(lane["client"], lane["down"], weight.unsqueeze(0))
        for weight in (real.unsqueeze(0), torch.stack([real, torch.zeros(size)]))
    ]
    (before, sent_before), (after, sent_after) = results
    assert same(before, after) and same(sent_before, sent_after)
    assert not same(tree.row(before, 0), client) or not same(tree.row(sent_before, 0), down), "the real batch did train"


def check_lanes(task, algorithm, client, down, names):
    """Check that lanes with minibatches of their own give what the loop gives, for passes of two minibatches each."""
    batches = [[small_task.batch(2 * lane + place) for place in range(2)] for lane in range(2)]

    def in_lane(client, down, x, y):
        real = [
            small_task.padded(*batch, torch.ones(len(batch[1]))) for batch in zip(x.unbind(0), y.unbind(0), strict=True)
        ]
        return algorithm.client_update(task.replace(batched=True), client, down, data_of(dict.fromkeys(names, real)))

    rows = tree.stack([{"client": client, "down": down}] * 2)
    x, y = (torch.stack([torch.stack([getattr(batch, name) for batch in pair]) for pair in batches]) for name in "xy")
    lanes = torch.func.vmap(in_lane)(rows["client"], rows["down"], x, y)
    for lane, lane_batches in enumerate(batches):
        loop = algorithm.client_update(task, client, down, data_of(dict.fromkeys(names, lane_batches)))
        for actual, expected in zip(lanes, loop, strict=True):
            for path, leaf in tree.leaves(expected):
                # 1e-5: float32 sums in another order.
                torch.testing.assert_close(tree.at(tree.row(actual, lane), path), leaf, rtol=0, atol=1e-5)
