"""A few forward passes of a torch module before it is trained: what it does that a model may not, and what it keeps."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from pflmpi import global_generators
from pflmpi.errors import ConfigError, PflmpiError
from pflmpi.models.base import Shape
from pflmpi.models.built_module import Recipe, equal, is_plain
from pflmpi.models.installed_module import InstalledModule
from pflmpi.models.module_parts import buffers, dropouts, forward_pass, has_unread_counter
from pflmpi.models.python_state import changed, python_state

_LINE = 160  # characters
_STORED = (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool)


@dataclass(frozen=True)
class Findings:
    """What is known of a module from some passes.

    Attributes:
        num_features: d.
        state: names of the buffers that training changes, or that follow from the seed; the others are constants.
        renewed: those of them which the module gives anew.
        own_head: the head does more than x W^T + b.
        looks_back: its backward pass reads the module again, as `torch.utils.checkpoint` does.
        entries: the names in its state dict, and the path of each in a model; "" for constants.
    """

    num_features: int
    state: tuple[str, ...]
    renewed: tuple[str, ...]
    own_head: bool
    looks_back: bool
    entries: tuple[tuple[str, str], ...]


def examine(name: str, recipe: Recipe, shape: Shape) -> tuple[Findings, InstalledModule]:
    """What some passes show, and the body that made them.

    Raises:
        ConfigError: the module does not take such samples, does not end with its head, or keeps what is no buffer.
    """
    module, _ = recipe.build(0)
    trial = _Trial(name, module, recipe.head, shape)
    trial.mode(training=False)
    before = {key: (value, value.clone()) for key, value in buffers(module).items()}
    trial.mode(training=True)
    after = buffers(module)
    moved = [key for key, (_, value) in before.items() if not equal(value, after[key])]
    rest = recipe.buffers_of_seed([key for key in before if key not in moved], module)
    state = tuple(key for key in before if key in moved or key in rest)
    for key in state:
        if after[key].dtype not in _STORED:
            what = f"a buffer of {str(after[key].dtype)[6:]}, which checkpoints cannot hold"
            raise ConfigError(f"{key} of model {name} is {what}; let it be float32")
    renewed = tuple(key for key in state if after[key] is not before[key][0])
    head, entries = module.get_submodule(recipe.head), _entries(module, recipe.head, state)
    assert isinstance(head, nn.Linear)
    module.set_submodule(recipe.head, nn.Identity())
    body = InstalledModule(module, state, renewed, name)
    return Findings(head.in_features, state, renewed, not is_plain(head), trial.looks_back(body), entries), body


class _Trial:
    """Passes over two samples that are all the same numbers for every model."""

    def __init__(self, name: str, module: nn.Module, head: str, shape: Shape) -> None:
        layer = module.get_submodule(head)
        assert isinstance(layer, nn.Linear)
        self._name, self._module, self._head, self._layer = name, module, head, layer
        self._x = torch.linspace(0, 1, 2 * int(np.prod(shape))).view(2, *shape)
        self._size = "x".join(map(str, shape))

    def mode(self, training: bool) -> None:
        """Check two passes in a mode: the first may fill caches, the second changes nothing but buffers in training."""
        module = self._module.train(training)
        seen: list[Tensor] = []
        generators = global_generators.states(False)
        self._run(self._x, training)
        before = python_state(module), self._tensors(training)
        handle = self._layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
        output = self._run(self._x.flip(0), training)
        handle.remove()
        self._check_output(output, seen, training)
        if global_generators.states(False) != generators:
            raise ConfigError(
                f"model {self._name} draws from a global generator of random numbers in its forward pass, so that a "
                "run could not be repeated; use nn.Dropout, whose masks follow from the seed"
            )
        self._check_state(*before, training)

    def _run(self, x: Tensor, training: bool) -> object:
        try:
            with torch.no_grad(), forward_pass(list(dropouts(self._module).values())):
                return self._module(x)
        except PflmpiError:
            raise
        except Exception as error:
            where = " in training" if training else ""
            says = first_line(error)
            raise ConfigError(f"model {self._name} cannot use samples of {self._size}{where}: {says}") from error

    def _tensors(self, training: bool) -> dict[str, Tensor]:
        own = dict(self._module.named_parameters())
        return {name: value.clone() for name, value in (own if training else own | buffers(self._module)).items()}

    def _check_output(self, output: object, seen: list[Tensor], training: bool) -> None:
        where, layer = " in training" if training else "", self._layer
        if not isinstance(output, Tensor):
            what = type(output).__name__
            raise ConfigError(f"model {self._name} returns a {what}{where}; forward must return scores [B, K] alone")
        with torch.no_grad():
            ends = len(seen) == 1 and seen[0].shape == (2, layer.in_features) and equal(output, layer(seen[0]))
        if not ends:
            raise ConfigError(
                f"model {self._name} does not end with {self._head}{where}: its output must be that of {self._head} "
                f"for features [B, {layer.in_features}], and nothing may follow, such as a softmax"
            )
        with torch.no_grad():
            alike = equal(layer.eval()(seen[0]), layer.train()(seen[0]))
        layer.train(training)
        if not alike:
            raise ConfigError(
                f"model.head = {self._head!r} of {self._name} gives other scores in training; what "
                "is done in training alone belongs in the layers before it"
            )

    def _check_state(self, python: dict[str, object], tensors: dict[str, Tensor], training: bool) -> None:
        now, where = self._tensors(training), "training" if training else "evaluation"
        if wrong := [key for key, value in tensors.items() if key not in now or not equal(value, now[key])]:
            raise ConfigError(
                f"model {self._name} changes {wrong[0]} in a forward pass in {where}; what a model changes by itself "
                "are buffers, while it is trained"
            )
        if wrong := changed(python, python_state(self._module)):
            raise ConfigError(
                f"model {self._name} changes {wrong[0]} in a forward pass in {where}, which all clients of a rank "
                "would share, and which no checkpoint has; keep it in a buffer (register_buffer), or leave it out"
            )

    def looks_back(self, body: InstalledModule) -> bool:
        """Whether gradients are others when other tensors have come into the module before its backward pass."""
        values = {key: value.detach() for key, value in self._module.named_parameters()}
        kept = {key: value.clone() for key, value in buffers(self._module).items() if key in body.state}
        key = torch.tensor(0) if body.dropouts else None

        def slopes(disturb: bool) -> list[Tensor]:
            leaves = {key: value.clone().requires_grad_() for key, value in values.items()}
            own = {key: value.clone() for key, value in kept.items()}
            z = body.call({**leaves, **own}, key, True, self._x)
            if disturb:
                body.install({key: value * torch.nan for key, value in values.items()} | own)
            return list(torch.autograd.grad(z.square().sum(), list(leaves.values()), materialize_grads=True))

        if not values:
            return False
        with torch.enable_grad():
            try:
                expected = slopes(False)
            except PflmpiError:
                raise
            except Exception as error:
                raise ConfigError(f"model {self._name} cannot be trained: {first_line(error)}") from error
            try:
                return not all(map(equal, expected, slopes(True)))
            except Exception:  # what it computed again did not fit together
                return True


def _entries(module: nn.Module, head: str, state: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """See `Findings.entries`; counters of batch norm, which nobody reads here, are constants."""
    names = {id(value): f"body.{name}" for name, value in module.named_parameters() if not name.startswith(f"{head}.")}
    names |= {id(value): f"head.{name}" for name, value in module.get_submodule(head).named_parameters()}
    names |= {id(value): f"stats.{name}" for name, value in buffers(module).items() if name in state}
    stored = module.state_dict(keep_vars=True)
    entries: list[tuple[str, str]] = []
    for name, value in stored.items():
        if isinstance(value, Tensor):
            entries.append((name, names.get(id(value), "").replace(".", "/")))
        layer, _, last = name.rpartition(".")
        if last == "running_var" and has_unread_counter(module.get_submodule(layer)):
            entries.append((f"{layer}.num_batches_tracked", ""))
    return tuple(entries)


def first_line(error: Exception) -> str:
    """What an error of PyTorch says, cut to a line."""
    says = str(error).splitlines()[0] if str(error) else type(error).__name__
    return says if len(says) <= _LINE else f"{says[:_LINE]} ..."
