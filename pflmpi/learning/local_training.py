"""Optimizer state and training loss of one client during one round."""

import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.tree import Tree

OPTIMIZER = "optimizer"  # name of the optimizer state that is kept between rounds, in a client's state


class LocalTraining:
    """Optimizer state across rounds, and the mean loss of the steps of a round.

    Args:
        states: by name of the training, from the client's last round; None if they are not kept between rounds.
        measured: names of the trainings whose loss is reported; () for all.
    """

    def __init__(self, states: Tree | None, measured: tuple[str, ...]) -> None:
        self.states: Tree = dict(states or {})
        self._keeps_states, self._measured = states is not None, measured
        self._started: set[str] = set()
        self._loss_sum: Tensor | None = None
        self._num_steps: Tensor | float = 0.0

    def begin(self, name: str, initial: Tree) -> Tree:
        """The optimizer state that a training starts with: the one kept under its name, or `initial`."""
        if not self._keeps_states or not initial:
            return initial
        if name not in self.states:
            declared = ", ".join(self.states) or "none"
            raise ValueError(f"trains {name!r}, which `trainings` does not declare; declared: {declared}")
        if name in self._started:
            raise ValueError(
                f"trains {name!r} twice in a round, so that its optimizer state cannot be kept; give each training a "
                "name of its own and declare them in `trainings`"
            )
        self._started.add(name)
        state = tree.part(self.states, name)
        if differences := tree.differences(initial, state):
            like = f"{{{name!r}: task.like('body')}}"
            raise ValueError(
                f"trains other parameters as {name!r} than `trainings` declares: {'; '.join(differences[:3])}; "
                f"override `trainings`, as by return {like} where the head is frozen"
            )
        return tree.clone(state)

    def end(self, name: str, state: Tree) -> None:
        """Keeps the optimizer state that a training ends with."""
        if self._keeps_states and state:
            self.states[name] = state

    def loss_sum(self, name: str, like: Tensor) -> Tensor | None:
        """[] float64, to which the loss of each step of a training is added in place; None if it is not reported.

        `like` is a tensor that differs between lanes if there are any.
        """
        if self._measured and name not in self._measured:
            return None
        if self._loss_sum is None:
            self._loss_sum = torch.zeros_like(like.detach().reshape(-1)[0], dtype=torch.float64)
        return self._loss_sum

    def count(self, active: Tensor | float) -> None:
        """Counts a step whose loss is reported; 0 where `active` is 0."""
        self._num_steps = self._num_steps + active

    @property
    def counted(self) -> bool:
        """Whether any step was counted; not for vmapped calls."""
        return bool(self._num_steps)

    def mean_loss(self, like: Tensor) -> Tensor:
        """[] float64, the mean loss over the counted steps, NaN without any; `like` is on the client's device."""
        if self._loss_sum is None:
            return torch.full((), torch.nan, dtype=torch.float64, device=like.device)
        return self._loss_sum / self._num_steps  # 0 / 0 is NaN, for a client without a minibatch
