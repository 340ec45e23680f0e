"""Calls a torch module on the tensors of a tree, by putting them in the slots of its parameters and buffers.

Outside a vmapped call they stay there afterwards, so that what a module does after its forward pass, such as
recomputing in the backward pass, sees the tensors that it was called with. Only buffers that the module replaces by new
tensors are copied.
"""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from pflmpi.errors import ConfigError
from pflmpi.models.module_parts import Slot, find_buffers, find_dropouts, find_slots, forward_pass
from pflmpi.vmap_lanes import in_lane, in_vmap, of_all_lanes

_LOOP = "; set runtime.executor to loop"
_hooked = WeakIdKeyDictionary()  # leaves that already have the hooks of a module's parameter


class InstalledModule:
    """A module and the tensors in its slots.

    Attributes:
        leaves: by name, the tensors now in the slots of its parameters and of its buffers with state.
        training: the mode that it is in; None before its first call.
        parameters: their names, in the order of the module.
        hooks: of its parameters, by name.

    Args:
        module: with parameters as its class makes them; the leaves get their hooks.
        state, updated, replaced: names of buffers, see `Findings`.
        name: of the model, for errors.
    """

    def __init__(
        self, module: nn.Module, state: Iterable[str], updated: Collection[str], replaced: Iterable[str], name: str
    ) -> None:
        self.leaves: dict[str, Tensor] = {}
        self.training: bool | None = None
        self.module, self._name, self._replaced = module, name, set(replaced)
        self.dropouts = find_dropouts(module)
        names, places = find_buffers(module), find_slots(module)
        self.parameters = [name for name, _ in module.named_parameters()]
        self.state = [name for name in state if name in names]
        self._of_seed = [name for name in self.state if name not in updated]
        self._slots: dict[str, list[Slot]] = {name: places[name] for name in (*self.parameters, *self.state)}
        self._constants = [
            (name, places[name][0], value, value._version) for name, value in names.items() if name not in self.state
        ]
        self.hooks = {
            name: list(value._backward_hooks.values())
            for name, value in module.named_parameters()
            if value._backward_hooks
        }
        self._recurrent = [layer for layer in module.modules() if isinstance(layer, nn.RNNBase)]
        self._has_cells = any(isinstance(layer, nn.RNNCellBase) for layer in module.modules())

    def holds(self, leaves: dict[str, Tensor], training: bool) -> bool:
        """Whether exactly these tensors are in its slots, and it is in that mode."""
        return training is self.training and all(self.leaves.get(name) is leaf for name, leaf in leaves.items())

    def call(self, leaves: dict[str, Tensor], key: Tensor | None, training: bool, x: Tensor) -> Tensor:
        """Returns the module's output for x: [B, ...]; buffers among the leaves are updated in place.

        Args:
            leaves: all parameters, and the buffers with state, by name.
            key: of the dropout masks; None in evaluation.
        """
        if training is not self.training:
            self.module.train(training)
            self.training = training
        if in_vmap():
            return self._call_in_lane(leaves, key, x)
        self.install(leaves)
        versions = self._versions(leaves)
        with forward_pass(self.dropouts.values(), key):
            output: Tensor = self.module(x)
        if training:  # in evaluation no buffer changes
            self._keep_buffers()
        self._check_constants(leaves, versions)
        return output

    def install(self, leaves: dict[str, Tensor]) -> None:
        """Puts tensors in the slots."""
        self.leaves = leaves
        copies = {name: leaves[name].clone() for name in self._replaced}
        self._fill((place, copies.get(name, leaves[name])) for name, places in self._slots.items() for place in places)
        for name, hooks in self.hooks.items():
            leaf = leaves[name]
            if leaf.requires_grad and torch.is_grad_enabled() and leaf not in _hooked:
                _hooked[leaf] = True
                for hook in hooks:
                    leaf.register_hook(hook)  # type: ignore[no-untyped-call]

    def _keep_buffers(self) -> None:
        """Copies buffers that the module has replaced into their leaves."""
        for name in self.state:
            (owner, key), leaf = self._slots[name][0], self.leaves[name]
            if owner[key] is not leaf:
                self._replaced.add(name)  # later calls put a copy in the slot, which autograd may keep
                with torch.no_grad():
                    leaf.copy_(owner[key])

    def _versions(self, leaves: dict[str, Tensor]) -> dict[str, int]:
        """Returns the versions of the buffers that depend on the seed alone."""
        return {name: of_all_lanes(leaves[name])._version for name in self._of_seed}

    def _check_constants(self, leaves: dict[str, Tensor], versions: dict[str, int]) -> None:
        """Raises `ConfigError` if a constant, or a buffer of the seed that had these versions, has changed."""
        changed = [
            name
            for name, (owner, key), value, version in self._constants
            if owner[key] is not value or value._version != version
        ]
        now = self._versions(leaves)
        changed += [name for name, version in versions.items() if now[name] != version]
        if changed:
            raise ConfigError(
                f"model {self._name} changes its buffer {changed[0]} in a forward pass, but did not before the start, "
                "so that it was taken for a constant; change it in every forward pass in training, or in none"
            )

    def _call_in_lane(self, leaves: dict[str, Tensor], key: Tensor | None, x: Tensor) -> Tensor:
        """As `call`; afterwards the tensors of the lane, which end with the vmapped call, are removed from the slots.

        Tensors that are the same in all lanes stay there.
        """
        if self.hooks:
            raise RuntimeError(f"vmap: hooks of parameters, as {next(iter(self.hooks))} has, are not called" + _LOOP)
        tensors = [(place, leaves[name]) for name, places in self._slots.items() for place in places]
        before = [(place, place[0][place[1]]) for place, tensor in tensors if in_lane(tensor)]
        versions = self._versions(leaves)
        try:
            self._fill(tensors)
            with forward_pass(self.dropouts.values(), key):
                output = self._forward_in_lane(x)
            for name in self.state:
                owner, slot = self._slots[name][0]
                if owner[slot] is not leaves[name]:
                    raise RuntimeError(
                        f"vmap: buffer {name} is given anew in the forward pass, which is not kept{_LOOP}"
                    )
        finally:
            self._fill(before)
            for layer in self.dropouts.values():
                layer.key = None
        self._check_constants(leaves, versions)
        return output

    def _forward_in_lane(self, x: Tensor) -> Tensor:
        """Inside a derivative vmap sees the steps of recurrent layers, outside of one an operation it cannot batch."""
        if self._recurrent or self._has_cells:
            output: Tensor = torch.func.vjp(lambda _: self.module(x), torch.zeros(()))[0]
        else:
            output = self.module(x)
        return output

    def _fill(self, tensors: Iterable[tuple[Slot, Tensor]]) -> None:
        for (owner, key), tensor in tensors:
            owner[key] = tensor
        for layer in self._recurrent:
            layer._flat_weights = [getattr(layer, name) for name in layer._flat_weights_names]
