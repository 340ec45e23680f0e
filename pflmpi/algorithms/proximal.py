"""The loss of a model that is drawn to another: what several methods for personal models have in common."""

from pflmpi.algorithms.base import only
from pflmpi.learning.client import Loss, model_loss, squared_distance
from pflmpi.learning.task import Task
from pflmpi.tree import Tree


def proximal_loss(task: Task, anchor: Tree, weight: float) -> Loss:
    """Cross-entropy + weight/2 ||w - anchor||^2, over body and head; with weight 0 the plain loss, bit for bit.

    Args:
        task: the task.
        anchor: a model; batch-norm statistics in it count for nothing.
        weight: the strength of the pull; its gradient is weight (w - anchor).
    """
    plain, fixed = model_loss(task), only(anchor, ("body", "head"))
    if weight == 0:
        return plain
    return lambda model, batch: plain(model, batch) + weight / 2 * squared_distance(model, fixed)
