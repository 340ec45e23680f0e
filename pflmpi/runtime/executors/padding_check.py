"""Lanes pad short batches. An algorithm whose results depend on the padding is refused before the first round."""

import numpy as np
import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.algorithms.base import Algorithm, initial_client
from pflmpi.errors import ConfigError
from pflmpi.learning.client import ClientData, Passes
from pflmpi.learning.task import HOST, Task
from pflmpi.messages.kinds import Downlink, Messages, OwnClasses, with_rows
from pflmpi.rng import stream
from pflmpi.runtime.contract import calling, check_returned, state_and_messages
from pflmpi.runtime.executors.batches import LaneBatches
from pflmpi.tree import Tree

_REAL, _WIDTH = 3, 5  # samples of the batch, places in it
_LARGEST_RATE = 0.1  # a rate that makes clients diverge, so that nothing can be compared, is the run's to report


def check_padding(algorithm: Algorithm, task: Task, client: int) -> None:
    """Raise `ConfigError` if `client_update` sees what is in the padding of a batch, or counts a batch of padding.

    The client takes one step on random samples, three times: with blank padding, with other images and labels in it,
    and with a further batch that is padding alone. All three must end in the same bits.

    Args:
        task: of the cohort; `client` is one of its clients.
    """
    task = task.replace(device=HOST)  # `plan` has no GPU, and what an algorithm does with padding depends on none
    blank = _update(algorithm, task, client, filled=False, steps=1)
    for what, other in (
        ("images and labels in the padding of a batch", _update(algorithm, task, client, filled=True, steps=1)),
        ("a batch that is padding alone", _update(algorithm, task, client, filled=False, steps=2)),
    ):
        wrong = [path for path, leaf in tree.leaves(blank) if not _same(leaf, tree.at(other, path))]
        if wrong:
            raise ConfigError(
                f"{type(algorithm).__name__}.client_update depends on {what}: {', '.join(wrong[:3])} differ; average "
                "losses over real samples (pflmpi.learning.client: cross_entropy, average, or Batch.padding), or set "
                "runtime.executor to loop, which pads nothing"
            )


def _update(algorithm: Algorithm, task: Task, client: int, filled: bool, steps: int) -> Tree:
    """The new state and the uplink of one client after `client_update` in a lane."""
    rng = stream(task.seed, 0, client, "padding check")
    shape = (2, _WIDTH, *task.architecture.shape)  # two steps, of which one may be left out
    images = torch.from_numpy(rng.integers(0, 256, shape, np.uint8))
    labels = torch.from_numpy(rng.integers(0, task.num_classes, shape[:2]))
    weight = torch.zeros(shape[:2])
    weight[0, :_REAL] = 1
    if not filled:
        images[weight == 0], labels[weight == 0] = 0, 0
    keys = torch.arange(2)
    counts = torch.bincount(labels[0, :_REAL], minlength=task.num_classes).float()
    training = task.training.model_copy(update={"lr": min(task.training.lr, _LARGEST_RATE)})
    batched = task.replace(batched=True, training=training)

    def one(state: Tree, down: Messages, images: Tensor, labels: Tensor, weight: Tensor, keys: Tensor) -> Tree:
        def batches(steps: int) -> LaneBatches:
            samples = images[:steps], labels[:steps]
            return LaneBatches(batched, lambda: samples, weight[:steps], 1, steps, keys[:steps])

        passes = {name: batches(steps) for name in algorithm.passes(task, 1)}
        data = ClientData(Passes(passes), batches(1), counts, training.learning_rate(1), 1)
        new, up = state_and_messages(algorithm, "client_update", algorithm.client_update(batched, state, down, data))
        if isinstance(new, dict):  # `check_state` looks at the rest of it in the first round
            check_returned(algorithm, "client_update", new)
        return {"state": new, "uplink": {**up}}

    down = {name: example(kind, task, rng) for name, kind in algorithm.downlink(task).items()}
    lanes = tree.stack([initial_client(algorithm, task, client)])
    with calling(algorithm, "client_update", 0, [client], in_lanes=True):
        inputs = [value.unsqueeze(0) for value in (images, labels, weight, keys)]
        received = {name: tree.stack([value]) for name, value in down.items()}
        return torch.func.vmap(one)(lanes, received, *inputs)


def example(kind: Downlink, task: Task, rng: np.random.Generator) -> Tree:
    """A message for one client: small random numbers, zeros for integers, true."""
    like = with_rows(kind.like, task.num_classes) if isinstance(kind, OwnClasses) else kind.like

    def draw(leaf: Tensor) -> Tensor:
        if leaf.dtype.is_floating_point:
            return torch.from_numpy(rng.normal(0, 0.1, tuple(leaf.shape))).to(leaf.dtype)
        return torch.full(leaf.shape, leaf.dtype == torch.bool, dtype=leaf.dtype)

    return tree.map(draw, like)


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
