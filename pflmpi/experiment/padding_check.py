"""Whether `client_update` and transforms are independent of the padding of batches in lanes, tried before the run."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pflmpi import outside, tree
from pflmpi.algorithms.base import Algorithm, initial_client
from pflmpi.experiment.made_up_inputs import make_up_first_messages, make_up_labels
from pflmpi.learning.client import ClientData, Passes
from pflmpi.learning.task import HOST, Task
from pflmpi.learning.transforms import TRIED_KEYS, Transform
from pflmpi.messages.kinds import Messages
from pflmpi.models.torch_module import ModuleArchitecture
from pflmpi.rng import stream
from pflmpi.runtime.contract import calling, check_returned, different_bits, state_and_messages
from pflmpi.runtime.executors.batches import LaneBatches
from pflmpi.text import first_line
from pflmpi.tree import Tree

_REAL, _WIDTH, _WIDER = 3, 7, 9  # real samples of a batch, its width, and its width with more padding
_ROUNDING = 1e-5  # allowed change by more padding, relative to 1 + the largest entry: float32 sums in another order
_LARGEST_RATE = 0.1  # with a larger one clients may diverge, so that nothing can be compared


def find_lane_problem(
    algorithm: Algorithm, tasks: Sequence[Task], cohort: np.ndarray, transform: Transform | None, images: np.ndarray
) -> str:
    """Returns why a transform, or an algorithm, model or task from outside, cannot be computed in lanes; "" if none.

    What the package itself computes is tried by its tests, not before every run.

    Args:
        tasks: one per cohort.
        cohort: [N] the cohort of each client.
        images: [n, ...] of the dataset.
    """
    if transform is not None and (problem := find_transform_problem(transform, images)):
        return problem
    for number, task in enumerate(tasks):
        kinds = type(algorithm), type(task.architecture), type(task.kind)
        is_own = isinstance(task.architecture, ModuleArchitecture) or any(map(outside.is_from_outside, kinds))
        if is_own and (problem := find_padding_problem(algorithm, task, int(np.argmax(cohort == number)), images)):
            return problem
    return ""


def find_transform_problem(transform: Transform, images: np.ndarray) -> str:
    """Returns which transform cannot be computed in lanes, or computes with the padding of a batch; "" if none.

    Args:
        images: [n, ...] of the dataset.
    """
    batch = torch.from_numpy(images[np.linspace(0, len(images) - 1, _WIDTH).astype(np.int64)])
    for function in transform.functions:
        where = f"data.transform: {function.__name__}"
        for key in TRIED_KEYS:  # it may mix samples at some of them alone
            with outside.as_config_error():
                alone, padded = function(batch[:_REAL].clone(), key), function(batch.clone(), key)
            if beyond_rounding({"samples": alone.float()}, {"samples": padded[:_REAL].float()}):
                return f"{where} computes a sample from others of its batch, which has padding"
        try:
            in_lanes = torch.func.vmap(function)(batch.unsqueeze(0).clone(), key.unsqueeze(0))[0]
        except Exception as error:
            reason = first_line(error).partition(". ")[0]  # what follows is advice on PyTorch itself
            return f"{where} works client by client and fails in lanes, at {outside.find_location(error)}: {reason}"
        if not torch.equal(in_lanes, padded):
            return f"{where} makes other samples in lanes than client by client"
    return ""


def beyond_rounding(one: Tree, other: Tree) -> list[str]:
    """Returns the paths whose leaves differ by more than rounding, without booleans, which rounding may flip."""
    paths = []
    for path, leaf in tree.leaves(one):
        if leaf.dtype == torch.bool or not leaf.numel():
            continue
        allowed = _ROUNDING * (1 + float(leaf.abs().nan_to_num().max()))
        if not torch.allclose(leaf, tree.at(other, path), rtol=0, atol=allowed, equal_nan=True):
            paths.append(path)
    return paths


def find_padding_problem(algorithm: Algorithm, task: Task, client: int, images: np.ndarray) -> str:
    """Returns how `client_update` depends on the padding of a batch, and what to do; "" if it does not.

    The client takes one step on samples of the data, twice: with the padding of a run, and with other images and labels
    in the padding and a further batch that is all padding. Both must give the same bits; where they do not, each change
    is tried by itself. An algorithm from outside is also tried with more padding, and must agree within rounding.
    """
    own = outside.is_from_outside(type(algorithm))
    name = f"{type(algorithm).__name__}.client_update" if own else f"the training of model {task.architecture.name}"
    task = task.replace(device=HOST)  # `plan` has no GPU, and what an algorithm does with padding depends on none
    update = partial(_update, algorithm, task, client, images)
    blank = update(filled=False, steps=1)
    if not all(leaf.isfinite().all() for _, leaf in tree.leaves(blank)):
        return ""  # the first round says that it diverges
    if not different_bits(blank, update(filled=True, steps=2)):
        if not own:
            return ""
        if paths := beyond_rounding(blank, update(filled=False, steps=1, width=_WIDER)):
            return (
                f"{name} depends on how much padding is in a batch: {', '.join(paths[:3])} differ; count real samples "
                "by batch.count in place of len(batch.y)"
            )
        return ""
    for what, filled, steps in (
        ("images and labels in the padding of a batch", True, 1),
        ("a batch that is padding alone", False, 2),
        ("a batch of padding with images and labels in it", True, 2),
    ):
        if paths := different_bits(blank, update(filled, steps)):
            helpers = "pflmpi.learning.client: cross_entropy, average, or Batch.padding"
            advice = f"; average losses over real samples ({helpers})" if own else ""
            return f"{name} depends on {what}: {', '.join(paths[:3])} differ{advice}"
    return ""


def _update(
    algorithm: Algorithm, task: Task, client: int, images: np.ndarray, filled: bool, steps: int, width: int = _WIDTH
) -> Tree:
    """Returns new states and uplinks of one client after `client_update` in two lanes, with batches of a width."""
    rng = stream(task.seed, 0, client, "padding check")
    weight = torch.zeros(2, 2, width)
    weight[:, 0, :_REAL] = 1
    samples, labels = (values[:, :, :width].contiguous() for values in _draw_samples(task, images, rng))
    if not filled:  # as in a run, which pads with the first sample
        samples[weight == 0], labels[weight == 0] = torch.tensor(images[:1]), 0
    counts = torch.full((2, 1), float(_REAL))
    if task.kind.classes:
        counts = torch.stack([lane.bincount(minlength=task.num_classes) for lane in labels[:, 0, :_REAL]]).float()
    # SGD, because Adam takes a full step along a gradient that is only rounding, as of a bias that no score depends on.
    plain = {"lr": min(task.training.lr, _LARGEST_RATE), "optimizer": "sgd", "precision": "fp32"}
    training = task.training.model_copy(update=plain)
    batched = task.replace(batched=True, training=training)

    def in_lane(state: Tree, down: Messages, counts: Tensor, *batch: Tensor) -> Tree:
        images, labels, weight, keys = batch

        def batches(steps: int) -> LaneBatches:
            samples = images[:steps], labels[:steps]
            drawn = keys[:steps] if algorithm.draws_noise or task.architecture.draws_noise else None
            return LaneBatches(batched, lambda: samples, weight[:steps], 1, steps, drawn)

        passes = {name: batches(steps) for name in algorithm.passes(task, 1)}
        data = ClientData(Passes(passes), batches(1), counts, training.learning_rate(1), 1)
        new, up = state_and_messages(algorithm, "client_update", algorithm.client_update(batched, state, down, data))
        if isinstance(new, dict):  # `check_state` checks the rest in the first round
            check_returned(algorithm, "client_update", new)
        return {"state": new, "uplink": {**up}}

    down = make_up_first_messages(algorithm, task, client, rng)
    lanes = tree.stack([initial_client(algorithm, task, client)] * 2)
    architecture = task.architecture  # masks of a module that has its batch on another axis depend on the padding
    masks = architecture.without_dropout() if isinstance(architecture, ModuleArchitecture) else nullcontext()
    with masks, calling(algorithm, "client_update", 0, [client], in_lanes=True):
        received = {name: tree.stack([value] * 2) for name, value in down.items()}
        return torch.func.vmap(in_lane)(lanes, received, counts, samples, labels, weight, torch.arange(2).expand(2, 2))


def _draw_samples(task: Task, images: np.ndarray, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Draws samples of the data [2, 2, B, ...], by lane and step, and makes up labels for them.

    The real samples of each lane are padding of the other, so that in one of them the largest value of any kind is in
    the padding. It also has a copy of a real sample, so that tokens of the padding are in real samples.
    """
    drawn = 1 + rng.choice(len(images) - 1, min(2 * _REAL, len(images) - 1), replace=False)
    first, second = np.resize(drawn, (2, _REAL))
    index = np.zeros((2, 2, _WIDER), np.int64)
    index[0, :, :_WIDTH] = [*first, *second, first[0]]
    index[1, :, :_WIDTH] = [*second, *first, second[0]]
    return torch.from_numpy(images[index]), make_up_labels(task, index.shape, rng)
