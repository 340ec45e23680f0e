"""Runs a few forward passes of a torch module before training: refuses what a model may not do, and finds its state."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from pflmpi import global_generators
from pflmpi.errors import ConfigError, PflmpiError
from pflmpi.models.base import Shape
from pflmpi.models.built_module import Recipe, are_equal, is_plain
from pflmpi.models.head_place import replace_head
from pflmpi.models.installed_module import InstalledModule
from pflmpi.models.module_parts import find_buffers, find_dropouts, forward_pass, has_unread_counter, parameters_by_path
from pflmpi.models.python_state import collect_python_state
from pflmpi.text import first_line

_STORED = (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool)


@dataclass(frozen=True)
class Findings:
    """Properties of a module that trial passes show.

    Attributes:
        state: names of the buffers that training changes, or that depend on the seed; the others are constants.
        updated, replaced: those of them that training changes, and that the module replaces by new tensors.
        new_head: whether the head is replaced, as it is for another number of classes than the data has.
        head_in_file: whether the file of weights has a head for the classes of the data.
        own_head: whether the head does more than x W^T + b.
        rereads_module: whether its backward pass reads the module again, as `torch.utils.checkpoint` does.
        entries: the names in its state dict, and the path of each in a model; "" for constants.
        frozen: paths of the parameters with `requires_grad = False`.
        layers: paths of the modules of the body that own parameters, see `Architecture.layers`.
        axes: of the features between samples and d, such as the T of [B, T, d].
    """

    num_features: int
    state: tuple[str, ...]
    updated: tuple[str, ...]
    replaced: tuple[str, ...]
    new_head: bool
    head_in_file: bool
    own_head: bool
    rereads_module: bool
    entries: tuple[tuple[str, str], ...]
    frozen: tuple[str, ...]
    layers: tuple[str, ...]
    axes: tuple[int, ...]


def examine(name: str, recipe: Recipe, shape: Shape, samples: Tensor | None) -> tuple[Findings, InstalledModule]:
    """Builds a module and runs trial passes; returns its properties, and its body.

    Args:
        samples: [2, *shape], inputs of the passes; None for made-up ones.
    """
    module, loaded = recipe.build(0)
    trial = _Trial(name, module, recipe.head, shape, samples)
    trial.mode(training=False)
    before = find_buffers(module)
    values_before = {key: value.clone() for key, value in before.items()}
    trial.mode(training=True)
    after = find_buffers(module)
    updated = tuple(key for key, value in values_before.items() if not are_equal(value, after[key]))
    state = _find_state(name, recipe, module, updated)
    replaced = tuple(key for key in state if after[key] is not before[key])
    head, entries = module.get_submodule(recipe.head), _list_entries(module, recipe.head, state)
    assert isinstance(head, nn.Linear)
    frozen = tuple(path for path, value in parameters_by_path(module, recipe.head).items() if not value.requires_grad)
    replace_head(module, recipe.head)
    body = InstalledModule(module, state, updated, replaced, name)
    findings = Findings(
        num_features=head.in_features,
        state=state,
        updated=updated,
        replaced=replaced,
        new_head=head.out_features != recipe.num_classes and not loaded,
        head_in_file=bool(loaded),
        own_head=not is_plain(head),
        rereads_module=trial.rereads_module(body),
        entries=entries,
        frozen=frozen,
        layers=trial.layers(body.parameters),
        axes=trial.axes,
    )
    return findings, body


def _find_state(name: str, recipe: Recipe, module: nn.Module, updated: Sequence[str]) -> tuple[str, ...]:
    """Returns the buffers that training has changed or that depend on the seed."""
    values = find_buffers(module)
    of_seed = recipe.buffers_of_seed([key for key in values if key not in updated], module)
    state = tuple(key for key in values if key in updated or key in of_seed)
    for key in state:
        if values[key].dtype not in _STORED:
            what = f"a buffer of {str(values[key].dtype)[6:]}, which checkpoints cannot hold"
            raise ConfigError(f"{key} of model {name} is {what}; let it be float32")
    return state


class _Trial:
    """Passes over two samples of the data, or over two made-up ones that are the same for every model."""

    def __init__(self, name: str, module: nn.Module, head: str, shape: Shape, samples: Tensor | None) -> None:
        layer = module.get_submodule(head)
        assert isinstance(layer, nn.Linear)
        self._name, self._module, self._head, self._layer = name, module, head, layer
        self._x = torch.linspace(0, 1, 2 * prod(shape)).view(2, *shape) if samples is None else samples
        self._size = "x".join(map(str, shape)) + (", made up with values from 0 to 1" if samples is None else "")
        self.axes: tuple[int, ...] = ()
        self._called: dict[str, int] = {}  # submodules in the order of their first calls, by name

    def mode(self, training: bool) -> None:
        """Checks two passes in a mode: the first may fill caches, the second may only change buffers, in training."""
        module = self._module.train(training)
        head_inputs: list[Tensor] = []
        generators, names = global_generators.read_states(False), self._values().keys()
        self._note_calls(training)
        if late := [name for name in self._values() if name not in names]:
            raise ConfigError(
                f"model {self._name} registers {late[0]} in a forward pass; register it in __init__, so that every "
                "copy of the module has it"
            )
        before = collect_python_state(module), self._tensors(training), self._versions()
        handle = self._layer.register_forward_pre_hook(lambda _, inputs: head_inputs.append(inputs[0].detach()))
        output = self._run(self._x.flip(0), training)
        handle.remove()
        self._check_output(output, head_inputs, training)
        if global_generators.read_states(False) != generators:
            layer = self._drawing(training)
            where = f"{layer}, called in its forward pass," if layer else "its forward pass,"
            raise ConfigError(
                f"model {self._name} draws from a global generator of random numbers in {where} so that a run could "
                "not be repeated; use nn.Dropout, whose masks follow from the seed: with self.drop = nn.Dropout(p) "
                "self.drop(x.new_ones(len(x), 1, 1, 1)) * x drops whole samples, as stochastic depth does; set dropout "
                "of attention and recurrent layers to 0"
            )
        self._check_state(*before, training)

    def _note_calls(self, training: bool) -> None:
        """Runs a pass; in training it records the order in which submodules are called."""

        def note(layer: nn.Module, _: object) -> None:
            self._called.setdefault(names[layer], len(self._called))

        names = self._hookable()
        handles = [layer.register_forward_pre_hook(note) for layer in names] if training else []
        self._run(self._x, training)
        for handle in handles:
            handle.remove()

    def _drawing(self, training: bool) -> str:
        """Finds the innermost submodule that draws from a global generator in a pass; "" if no submodule does."""
        before: dict[nn.Module, object] = {}
        drawing: list[str] = []

        def begin(layer: nn.Module, _: object) -> None:
            before[layer] = global_generators.read_states(False)

        def end(layer: nn.Module, _: object, __: object) -> None:
            if before[layer] != global_generators.read_states(False):
                drawing.append(names[layer])

        names = self._hookable()
        handles = [layer.register_forward_pre_hook(begin) for layer in names]
        handles += [layer.register_forward_hook(end) for layer in names]
        self._run(self._x, training)
        for handle in handles:
            handle.remove()
        return drawing[0] if drawing else ""  # the innermost one ends first

    def _hookable(self) -> dict[nn.Module, str]:
        """Returns the submodules and their names, without scripted and compiled ones, which take no hooks."""
        compiled = {part for layer in self._module.modules() if hasattr(layer, "_orig_mod") for part in layer.modules()}
        named = self._module.named_modules()
        return {
            layer: name
            for name, layer in named
            if not isinstance(layer, torch.jit.ScriptModule) and layer not in compiled
        }

    def layers(self, names: Sequence[str]) -> tuple[str, ...]:
        """Returns the paths of the modules that own the parameters of these names, in the order of their first calls.

        One that is never called, such as an `nn.ParameterList`, follows the one that is registered before it.
        """
        order, last = dict[str, int](), -1
        for name in names:
            owner, parametrized, _ = name.partition(".parametrizations.")
            if not parametrized:
                owner = name.rpartition(".")[0]
            last = self._called.get(owner, last)
            order.setdefault(owner, last)
        return tuple(f"body.{owner}".rstrip(".").replace(".", "/") for owner in sorted(order, key=order.__getitem__))

    def _run(self, x: Tensor, training: bool) -> object:
        """Runs a forward pass; `ConfigError` if it fails or changes its input."""
        version = x._version
        try:
            key = torch.tensor(0) if training else None
            with torch.set_grad_enabled(training), forward_pass(find_dropouts(self._module).values(), key):
                output = self._module(x)
        except PflmpiError:
            raise
        except Exception as error:
            where = " in training" if training else ""
            reason = first_line(error)
            if "scalar types: Long" in reason:  # from an embedding
                reason += "; samples are float32, of which x.long() makes tokens"
            raise ConfigError(f"model {self._name} cannot use samples of {self._size}{where}: {reason}") from error
        if x._version != version:
            raise ConfigError(
                f"model {self._name} changes its input in place, which others read too; compute a new tensor, such as "
                "x = x - 0.5 for x.sub_(0.5)"
            )
        return output

    def _values(self) -> dict[str, Tensor]:
        """Returns its parameters and buffers by name."""
        return dict(self._module.named_parameters()) | find_buffers(self._module)

    def _versions(self) -> dict[str, int]:
        return {name: value._version for name, value in self._module.named_parameters()}

    def _tensors(self, training: bool) -> dict[str, Tensor]:
        own = dict(self._module.named_parameters()) if training else self._values()
        return {name: value.clone() for name, value in own.items()}

    def _are_features(self, z: Tensor) -> bool:
        """Whether these are features [2, ..., d]."""
        return z.ndim > 1 and (z.shape[0], z.shape[-1]) == (2, self._layer.in_features)

    def _check_output(self, output: object, head_inputs: list[Tensor], training: bool) -> None:
        """Raises `ConfigError` unless the output is that of the head, called once, for features; sets `axes`."""
        where, layer = " in training" if training else "", self._layer
        if not isinstance(output, Tensor):
            what = type(output).__name__
            raise ConfigError(f"model {self._name} returns a {what}{where}; forward must return scores [B, K] alone")
        if half := [value.dtype for value in (*head_inputs, output) if value.dtype in (torch.float16, torch.bfloat16)]:
            raise ConfigError(
                f"model {self._name} computes {self._head} in {str(half[0])[6:]}{where}; features and scores are "
                f"float32: end torch.autocast before {self._head}, and let its features be float32 (z.float())"
            )
        with torch.no_grad():
            ends_with_head = (
                len(head_inputs) == 1
                and self._are_features(head_inputs[0])
                and are_equal(output, layer(head_inputs[0]))
            )
        if not ends_with_head:
            raise ConfigError(
                f"model {self._name} does not end with {self._head}{where}: its output must be that of {self._head} "
                f"for features [B, {layer.in_features}], and nothing may follow, such as a softmax"
            )
        z = head_inputs[0]
        self.axes = tuple(z.shape[1:-1])
        with torch.no_grad():
            same_scores = are_equal(layer.eval()(z), layer.train()(z))
        layer.train(training)
        if not same_scores:
            raise ConfigError(
                f"model.head = {self._head!r} of {self._name} gives other scores in training; what "
                "is done in training alone belongs in the layers before it"
            )

    def _check_state(
        self, python: dict[str, object], tensors: dict[str, Tensor], versions: dict[str, int], training: bool
    ) -> None:
        """Raises `ConfigError` for changes since these values were recorded: only buffers may change, in training."""
        after, where = self._tensors(training), "training" if training else "evaluation"
        changed = [key for key, value in tensors.items() if key not in after or not are_equal(value, after[key])]
        changed += [key for key, version in self._versions().items() if version != versions.get(key)]
        if changed:
            raise ConfigError(
                f"model {self._name} changes {changed[0]} in a forward pass in {where}; what a model changes by itself "
                "are buffers, while it is trained"
            )
        now = collect_python_state(self._module)
        if changed := sorted(name for name in python.keys() | now.keys() if python.get(name) != now.get(name)):
            raise ConfigError(
                f"model {self._name} changes {changed[0]} in a forward pass in {where}, which all clients of a rank "
                "would share, and which no checkpoint has; keep it in a buffer (register_buffer), or leave it out"
            )

    def rereads_module(self, body: InstalledModule) -> bool:
        """Whether gradients change if other tensors are installed in the module before its backward pass."""
        values = {name: value.detach() for name, value in self._module.named_parameters()}
        state = {
            name: value.detach().clone() for name, value in find_buffers(self._module).items() if name in body.state
        }
        key = torch.tensor(0) if body.dropouts else None

        def gradients(replace: bool) -> list[Tensor]:
            leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
            state_leaves = {name: value.clone() for name, value in state.items()}
            z = body.call({**leaves, **state_leaves}, key, True, self._x)
            if replace:
                body.install({name: value * torch.nan for name, value in values.items()} | state_leaves)
            if not z.requires_grad:  # as of a body under torch.no_grad()
                return [torch.zeros_like(leaf) for leaf in leaves.values()]
            return list(torch.autograd.grad(z.square().sum(), list(leaves.values()), materialize_grads=True))

        if not values:
            return False
        with torch.enable_grad():
            try:
                expected = gradients(replace=False)
            except PflmpiError:
                raise
            except Exception as error:
                raise ConfigError(f"model {self._name} cannot be trained: {first_line(error)}") from error
            try:
                return not all(map(are_equal, expected, gradients(replace=True)))
            except Exception:  # the recomputed values have other shapes
                return True


def _list_entries(module: nn.Module, head: str, state: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Returns `Findings.entries`; the counters of batch norm, which nothing reads here, are constants."""
    names = {id(value): path for path, value in parameters_by_path(module, head).items()}
    names |= {
        id(value): f"stats/{name.replace('.', '/')}" for name, value in find_buffers(module).items() if name in state
    }
    stored = module.state_dict(keep_vars=True)
    entries: list[tuple[str, str]] = []
    for name, value in stored.items():
        if isinstance(value, Tensor):
            entries.append((name, names.get(id(value), "")))
        layer, _, last = name.rpartition(".")
        if last == "running_var" and has_unread_counter(module.get_submodule(layer)):
            entries.append((f"{layer}.num_batches_tracked", ""))
    return tuple(entries)
