"""Whether a torch module from outside is trained as a plain PyTorch loop trains it: some steps before the run."""

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from pflmpi import tree
from pflmpi.data.federation import Federation
from pflmpi.errors import ConfigError, PflmpiError
from pflmpi.learning.client import Batch, model_loss, task_loss
from pflmpi.learning.sgd import train
from pflmpi.learning.task import HOST, Task
from pflmpi.learning.training import TrainingConfig
from pflmpi.models.built_module import are_equal
from pflmpi.models.frozen import remove_paths
from pflmpi.models.module_parts import parameters_by_path, unflatten_names
from pflmpi.models.torch_module import ModuleArchitecture
from pflmpi.runtime.executors.batches import LaneBatches
from pflmpi.text import first_line
from pflmpi.tree import Tree

_STEPS, _SIZES = 4, (4, 3)  # steps, and batch sizes of the two clients; in lanes the second one's are padded
_RATE, _MOMENTUM, _DECAY = 0.01, 0.9, 0.1
_ABSOLUTE, _RELATIVE = 1e-6, 1e-3  # tolerances: rounding, and relative to the largest change of the leaf by training
_SWITCH = "; model.check = false leaves the comparison out"
_CAUSES = {
    "body": "a parameter that is also reached by another way than its own name (a list, an attribute, a closure), or "
    "something that the module keeps besides parameters and buffers (a global, an attribute of an object), or "
    "torch.utils.checkpoint with use_reentrant=True",
    "head": "a head that is reached by another way than its own name, or something that the module keeps besides "
    "parameters and buffers",
    "stats": "a buffer that is reached by another way than its own name, or that is changed in the backward pass",
}

_CAUSES_IN_LANES = dict.fromkeys(_CAUSES, "something that it computes in training from the padding of a batch")


def check_modules(tasks: Sequence[Task], cohort: np.ndarray, federation: Federation, in_lanes: bool) -> str:
    """Compares modules with plain PyTorch; returns why lanes do not train them as a loop does, "" where they do.

    Args:
        tasks: one per cohort.
        cohort: [N] the cohort of each client.
        in_lanes: whether clients would be computed in lanes.

    Raises:
        ConfigError: a loop does not train one as plain PyTorch does.
    """
    for number, task in enumerate(tasks):
        architecture = task.architecture
        if isinstance(architecture, ModuleArchitecture) and architecture.check:
            training = TrainingConfig(momentum=_MOMENTUM, weight_decay=_DECAY)
            task = task.replace(training=training, device=HOST, local=None)
            batches = _batches(task, federation, np.flatnonzero(cohort == number))
            with warnings.catch_warnings(), architecture.without_dropout(), torch.enable_grad():
                warnings.simplefilter("ignore")
                if problem := _check_module(architecture, task, batches, in_lanes):
                    return f"model {architecture.name} in lanes: {problem}"
    return ""


def _check_module(
    architecture: ModuleArchitecture, task: Task, batches: Sequence[Sequence[Batch]], in_lanes: bool
) -> str:
    """See `check_modules`; `batches` are those of two clients."""
    _check_construction(architecture)
    initial = task.init()
    expected = [_train_plainly(architecture, task, client_batches) for client_batches in batches]
    results = [_train_in_loop(task, initial, client_batches) for client_batches in batches]
    if problem := _difference(initial, expected, results, _CAUSES):
        raise ConfigError(
            f"model {architecture.name} is not trained as a plain PyTorch loop trains it: {problem}{_SWITCH}"
        )
    _check_sample_alone(task, tree.part(results[0], "model"), torch.cat([batch.x for batch in batches[0]]))
    if not in_lanes:
        return ""
    try:
        return _difference(initial, expected, _train_in_lanes(task, initial, batches), _CAUSES_IN_LANES)
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"


def _check_construction(architecture: ModuleArchitecture) -> None:
    """Raises `ConfigError` if a module has other values when it is built again with the same seed."""
    first, again = (architecture.recipe.build(0)[0] for _ in range(2))
    values = {**dict(again.named_parameters()), **dict(again.named_buffers())}
    for name, value in (*first.named_parameters(), *first.named_buffers()):
        if not (name in values and are_equal(value, values[name])):
            raise ConfigError(
                f"model {architecture.name} has another {name} when it is built again with the same seed, so that a "
                "run could not be repeated; draw from torch, whose seed is set before, or from a generator with a seed "
                "(torch.empty has what was in memory before)"
            )


def _batches(task: Task, federation: Federation, clients: np.ndarray) -> list[list[Batch]]:
    """Returns batches of training samples of the first two clients; few samples are repeated."""
    batches, dataset = [], federation.dataset
    for number, size in enumerate(_SIZES):
        client = clients[min(number, len(clients) - 1)]
        samples = federation.train[client] if len(federation.train[client]) else np.arange(len(dataset.labels))
        chosen = np.resize(samples, size * _STEPS)
        xs = torch.split(task.prepare(torch.tensor(dataset.images[chosen])), size)
        ys = torch.split(torch.tensor(dataset.labels[chosen]), size)
        batches.append([Batch(x, y, key=torch.tensor(0)) for x, y in zip(xs, ys, strict=True)])
    return batches


def _train_plainly(architecture: ModuleArchitecture, task: Task, batches: Sequence[Batch]) -> Tree:
    """Trains the module by SGD with momentum and weight decay, in a plain PyTorch loop.

    Without `torch.optim`, which takes a second to import.
    """
    module = architecture.recipe.plain(0)
    initial = task.whole(task.init())
    with torch.no_grad():
        for path, value in _paths(module, architecture).items():
            value.copy_(tree.at(initial, path))
    for path, parameter in parameters_by_path(module, architecture.recipe.head).items():
        parameter.requires_grad_(path not in task.frozen.paths)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    velocities: dict[int, Tensor] = {}
    module.train()
    try:
        for batch in batches:
            task_loss(task, module(batch.x), batch).backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                for number, parameter in enumerate(trained):
                    if parameter.grad is None:
                        continue
                    velocity = velocities.setdefault(number, torch.zeros_like(parameter))
                    gradient = parameter.grad.to_dense().add(parameter, alpha=_DECAY)
                    parameter.sub_(velocity.mul_(_MOMENTUM).add_(gradient), alpha=_RATE)
                    parameter.grad = None
        with torch.no_grad():
            scores = module.eval()(batches[0].x)
    except Exception as error:
        reason = first_line(error)
        raise ConfigError(f"model {architecture.name} cannot be trained by plain PyTorch either: {reason}") from error
    values = {path: value.detach() for path, value in _paths(module, architecture).items()}
    return {"model": remove_paths(tree.unflatten(values), task.frozen.paths), "scores": scores}


def _paths(module: nn.Module, architecture: ModuleArchitecture) -> dict[str, Tensor]:
    """Returns the tensors of a whole module by their paths in a model."""
    stats = {name: value for name, value in module.named_buffers() if name in architecture.findings.state}
    paths: dict[str, Tensor] = {**parameters_by_path(module, architecture.recipe.head)}
    return paths | {f"stats/{path}": value for path, value in tree.leaves(unflatten_names(stats))}


def _train_in_loop(task: Task, initial: Tree, batches: Sequence[Batch]) -> Tree:
    try:
        model = train(task, initial, batches, model_loss(task), _RATE)
        before = tree.map(torch.clone, model)
        with torch.no_grad():
            scores = task.predict(model, batches[0].x)
    except PflmpiError:
        raise
    except Exception as error:
        reason, name = first_line(error), task.architecture.name
        raise ConfigError(f"model {name} cannot be trained here, as plain PyTorch can: {reason}{_SWITCH}") from error
    if changed := [path for path, value in tree.leaves(before) if not are_equal(value, tree.at(model, path))]:
        raise ConfigError(
            f"model {task.architecture.name} changes {changed[0]} in a forward pass in evaluation, once it is trained; "
            f"what a model changes by itself are buffers, while it is trained{_SWITCH}"
        )
    return {"model": model, "scores": scores}


def _train_in_lanes(task: Task, initial: Tree, batches: Sequence[Sequence[Batch]]) -> list[Tree]:
    """Trains the models of both clients in one vmapped call."""
    task, shape = task.replace(batched=True), (2, _STEPS, max(_SIZES))
    first, weight = batches[0][0], torch.zeros(shape)  # its first sample is the padding, as in a run one of the data is
    images, labels = (values[0].expand(*shape, *values.shape[1:]).clone() for values in (first.x, first.y))
    for client, (client_batches, size) in enumerate(zip(batches, _SIZES, strict=True)):
        images[client, :, :size] = torch.stack([batch.x for batch in client_batches])
        labels[client, :, :size] = torch.stack([batch.y for batch in client_batches])
        weight[client, :, :size] = 1
    prepared = task.replace(mean=(0.0,), std=(1.0,))

    def in_lane(model: Tree, images: Tensor, labels: Tensor, weight: Tensor) -> Tree:
        keys = torch.zeros(_STEPS, dtype=torch.int64)
        lane_batches = LaneBatches(prepared, lambda: (images, labels), weight, _STEPS, _STEPS, keys)
        model = train(task, model, lane_batches, model_loss(task), _RATE)
        with torch.no_grad():
            return {"model": model, "scores": task.predict(model, images[0])}

    trained: Tree = torch.func.vmap(in_lane)(tree.stack([initial, initial]), images, labels, weight)
    results = [tree.row(trained, client) for client in range(2)]
    for result, size in zip(results, _SIZES, strict=True):
        result["scores"] = tree.leaf(result, "scores")[:size]
    return results


def _difference(initial: Tree, expected: Sequence[Tree], results: Sequence[Tree], causes: Mapping[str, str]) -> str:
    """Returns the first difference from plain PyTorch with its likely cause; "" without any."""
    for client, (plain, result) in enumerate(zip(expected, results, strict=True)):
        for path, target in tree.leaves(tree.part(plain, "model")):
            value, start = tree.at(tree.part(result, "model"), path), tree.at(initial, path)
            change, error = _largest_difference(target, start), _largest_difference(value, target)
            if not error <= _ABSOLUTE + _RELATIVE * change and not are_equal(value, target):
                what = "does not move" if are_equal(value, start) else f"is off by {error:.2g}"
                cause = causes[path.partition("/")[0]]
                return f"after {_STEPS} steps {path} of client {client} {what}, where it moves by {change:.2g}; {cause}"
        scores, target = tree.leaf(result, "scores"), tree.leaf(plain, "scores")
        if not _are_close(scores, target):
            return f"its scores in evaluation are off by {_largest_difference(scores, target):.2g}"
    return ""


def _check_sample_alone(task: Task, model: Tree, x: Tensor) -> None:
    """Raise `ConfigError` unless the scores of a sample in evaluation are the same alone as in a batch."""
    name = task.architecture.name
    try:
        with torch.no_grad():
            together, alone = task.predict(model, x), task.predict(model, x[:1])
        same = _are_close(alone, together[:1])
    except Exception:
        same = False
    if not same:
        raise ConfigError(
            f"model {name} scores a sample otherwise alone than beside others in evaluation, as batch norm without "
            "running statistics does, so that results would depend on who is tested together; use "
            f"track_running_stats=True, or model.norm = 'group'{_SWITCH}"
        )


def _are_close(scores: Tensor, target: Tensor) -> bool:
    allowed = 10 * _ABSOLUTE + _RELATIVE * _largest_difference(target, 0 * target)
    return _largest_difference(scores, target) <= allowed or are_equal(scores, target)


def _largest_difference(value: Tensor, target: Tensor) -> float:
    return 0.0 if torch.equal(value, target) else float((value.double() - target.double()).abs().max())
