"""Batch norm over the real samples of a padded batch, in lanes, for models that call PyTorch's `batch_norm`."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pflmpi.vmap_lanes import of_all_lanes, outside_vmap


class MaskedBatchNorm(TorchFunctionMode):
    """Context in which batch norm in training ignores padding, in its results and in its running statistics.

    Without any real sample the running statistics stay unchanged.

    Args:
        weight: [B] float32, 1 for real samples, 0 for padding, in a lane.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self._weight = weight

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.batch_norm and kwargs.get("training"):
            return _batch_norm(self._weight, *args, **kwargs)
        return function(*args, **kwargs)


def _batch_norm(
    real: Tensor,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    *,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """`F.batch_norm` of x [B, C, ...] over the real samples, 1 in `real` [B]; computed in float32."""
    if x.shape[0] != real.shape[0]:
        raise ValueError(
            f"batch norm is given {x.shape[0]} samples in training, and the batch has {real.shape[0]}; in lanes a loss "
            "must give the model its batch as it is; set runtime.executor to loop"
        )
    axes, channels = [0, *range(2, x.dim())], [-1, *[1] * (x.dim() - 2)]
    num_samples = real.sum()
    num_values = num_samples.clamp(min=1) * x[0, 0].numel()
    share = (real / num_values).view(-1, *[1] * (x.dim() - 1))
    mean = (x.float() * share).sum(axes)
    centred = x.float() - mean.view(channels)
    var = (centred.square() * share).sum(axes)
    if running_mean is not None and running_var is not None:
        rate = (num_samples > 0).float().view(1) * momentum
        _update_running(running_mean, mean, rate)
        _update_running(running_var, var * (num_values / (num_values - 1).clamp(min=1)), rate)
    # Without a real sample nothing is scaled: 1 / sqrt(eps) in each layer would take deep networks to infinity.
    scale = (torch.where(num_samples > 0, var, 1.0) + eps).rsqrt()
    normed = centred * (scale if weight is None else scale * weight).view(channels)
    return (normed if bias is None else normed + bias.view(channels)).to(x.dtype)


def _update_running(running: Tensor, of_batch: Tensor, rate: Tensor) -> None:
    """Moves running statistics towards those of a batch, in place: outside vmap, where no gradient forbids that."""
    with outside_vmap(), torch.no_grad():
        running, of_batch, rate = map(of_all_lanes, (running, of_batch, rate))
        running.mul_(1 - rate).add_(of_batch * rate)
