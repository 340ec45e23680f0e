"""Optimizer state and training loss of one client in one round."""

import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.tree import Tree

OPTIMIZER = "optimizer"  # where optimizer state is kept between rounds, beside the algorithm's state of a client


class LocalTraining:
    """Optimizer state that outlives the round, and the loss of the steps that are taken.

    Attributes:
        states: optimizer state by name of the training, where it is kept between rounds.

    Args:
        states: as the round before has left them; None where they are not kept.
        measured: names of the trainings whose loss counts; () for all.
    """

    def __init__(self, states: Tree | None, measured: tuple[str, ...]) -> None:
        self.states: Tree = dict(states or {})
        self._keeps, self._measured = states is not None, measured
        self._begun: set[str] = set()
        self._sum: Tensor | None = None
        self._steps: Tensor | float = 0.0

    def begin(self, name: str, initial: Tree) -> Tree:
        """The optimizer state that a training starts with; `initial` is that of a first one."""
        if not self._keeps or not initial:
            return initial
        if name not in self.states:
            declared = ", ".join(self.states) or "none"
            raise ValueError(f"trains {name!r}, which `trainings` does not declare; declared: {declared}")
        if name in self._begun:
            raise ValueError(
                f"trains {name!r} twice in a round, so that its optimizer state cannot be kept; give each training a "
                "name of its own and declare them in `trainings`"
            )
        self._begun.add(name)
        kept = tree.part(self.states, name)
        if wrong := tree.differences(initial, kept):
            like = f"{{{name!r}: task.like('body')}}"
            raise ValueError(
                f"trains other parameters as {name!r} than `trainings` declares: {'; '.join(wrong[:3])}; override "
                f"`trainings`, as by return {like} where the head is frozen"
            )
        return tree.clone(kept)

    def end(self, name: str, state: Tree) -> None:
        """Keep the optimizer state that a training ends with."""
        if self._keeps and state:
            self.states[name] = state

    def loss_sum(self, name: str, like: Tensor) -> Tensor | None:
        """[] float64, to add the loss of each step of a training to, in place; None if it does not count.

        Args:
            name: of the training.
            like: a tensor that differs between lanes if there are any.
        """
        if self._measured and name not in self._measured:
            return None
        if self._sum is None:
            self._sum = torch.zeros_like(like.detach().reshape(-1)[0], dtype=torch.float64)
        return self._sum

    def count(self, active: Tensor | float) -> None:
        """Count a step; 0 where `active` is."""
        self._steps = self._steps + active

    @property
    def counted(self) -> bool:
        """Whether any step has counted, outside a vmapped call."""
        return bool(self._steps)

    def mean_loss(self, like: Tensor) -> Tensor:
        """[] float64, the mean over the steps; NaN without any. `like` is on the device of the client."""
        if self._sum is None:
            return torch.full((), torch.nan, dtype=torch.float64, device=like.device)
        return self._sum / self._steps  # 0 / 0 is NaN, for a client without a minibatch
