"""Batch norm in lanes, over the real samples of a padded batch, for models that call PyTorch's `batch_norm`."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pflmpi.vmap_lanes import of_all_lanes, outside_vmap


class OverRealSamples(TorchFunctionMode):
    """While active, batch norm in training leaves out padding: its results and running statistics do not depend on it.

    Where there is no real sample at all the running statistics stay as they are.

    Args:
        weight: [B] float32, 1 for real samples, 0 for padding, in a lane.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self._weight = weight

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if function is F.batch_norm and given.get("training"):
            return _batch_norm(self._weight, *args, **given)
        return function(*args, **given)


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
    """`F.batch_norm` of x [B, C, ...] over the samples that are real [B]; in float32 between."""
    if x.shape[0] != real.shape[0]:
        raise ValueError(
            f"batch norm is given {x.shape[0]} samples in training, and the batch has {real.shape[0]}; in lanes a loss "
            "must give the model its batch as it is; set runtime.executor to loop"
        )
    over, channels = [0, *range(2, x.dim())], [-1, *[1] * (x.dim() - 2)]
    samples = real.sum()
    values = samples.clamp(min=1) * x[0, 0].numel()
    share = (real / values).view(-1, *[1] * (x.dim() - 1))
    mean = (x.float() * share).sum(over)
    apart = x.float() - mean.view(channels)
    var = (apart.square() * share).sum(over)
    if running_mean is not None and running_var is not None:
        rate = (samples > 0).float().view(1) * momentum
        _follow(running_mean, mean, rate)
        _follow(running_var, var * (values / (values - 1).clamp(min=1)), rate)
    # Without a real sample nothing is scaled: by 1 / sqrt(eps) in each layer, deep networks would reach infinity.
    scale = (torch.where(samples > 0, var, 1.0) + eps).rsqrt()
    normed = apart * (scale if weight is None else scale * weight).view(channels)
    return (normed if bias is None else normed + bias.view(channels)).to(x.dtype)


def _follow(running: Tensor, of_batch: Tensor, rate: Tensor) -> None:
    """Move running statistics to those of a batch, in place: behind the lanes, where a gradient is no obstacle."""
    with outside_vmap(), torch.no_grad():
        running, of_batch, rate = map(of_all_lanes, (running, of_batch, rate))
        running.mul_(1 - rate).add_(of_batch * rate)
