"""One update of two clients in one vmapped call beside the same client by client, for models that no quick run has."""

from typing import Any

import torch

import comparisons
import small_task
from pflmpi import tree
from pflmpi.algorithms.base import Algorithm
from pflmpi.learning.task import Task


def check_lanes(
    task: Task, algorithm: Algorithm, client: tree.Tree, down: dict[str, tree.Tree], names: tuple[str, ...]
) -> None:
    """Check that lanes with minibatches of their own give what the loop gives, for passes of two minibatches each."""
    batches = [[small_task.batch(2 * lane + place) for place in range(2)] for lane in range(2)]

    def in_lane(client: tree.Tree, down: dict[str, tree.Tree], x: torch.Tensor, y: torch.Tensor) -> Any:
        real = [small_task.padded(*one, torch.ones(len(one[1]))) for one in zip(x.unbind(0), y.unbind(0), strict=True)]
        return algorithm.client_update(
            task.replace(batched=True), client, down, comparisons.data_of(dict.fromkeys(names, real))
        )

    both = tree.stack([{"client": client, "down": down}] * 2)
    x, y = (torch.stack([torch.stack([getattr(one, name) for one in each]) for each in batches]) for name in "xy")
    lanes = torch.func.vmap(in_lane)(both["client"], both["down"], x, y)
    for lane, mine in enumerate(batches):
        loop = algorithm.client_update(task, client, down, comparisons.data_of(dict.fromkeys(names, mine)))
        for found, expected in zip(lanes, loop, strict=True):
            for path, leaf in tree.leaves(expected):
                # 1e-5: float32 sums in another order.
                torch.testing.assert_close(tree.at(tree.row(found, lane), path), leaf, rtol=0, atol=1e-5)
