"""The proximal loss, shared by several methods for personal models."""

from torch import Tensor

from pflmpi.algorithms.base import TRAINED_PARTS, only
from pflmpi.learning.client import Batch, Loss, model_loss, squared_distance
from pflmpi.learning.task import Task
from pflmpi.tree import Tree, part


def proximal_loss(task: Task, weight: float) -> Loss:
    """The task's loss + weight/2 ||w - anchor||^2, over body and head; with weight 0 the plain loss, bit for bit.

    The anchor is `params["anchor"]`, a model given to `train` as `fixed`; its batch-norm statistics are ignored.

    Args:
        weight: of the proximal term, whose gradient is weight (w - anchor).
    """
    plain = model_loss(task)
    if weight == 0:
        return plain

    def loss(params: Tree, batch: Batch) -> Tensor:
        anchor = only(part(params, "anchor"), TRAINED_PARTS)
        return plain(params, batch) + weight / 2 * squared_distance(params, anchor)

    return loss
