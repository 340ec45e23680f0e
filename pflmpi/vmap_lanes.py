"""The batched tensor behind a lane of `torch.vmap`; the only file with PyTorch's private functions for that (2.14).

Inside a vmapped call a tensor has the shape of one client's; behind it is a tensor with the values of all lanes. What
`vmap` cannot do, or does in more operations, is computed on that one.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

_functorch = torch._C._functorch

outside_vmap = temporarily_clear_interpreter_stack  # a context in which operations are on the batched tensors
in_vmap: Callable[[], bool] = torch._C._are_functorch_transforms_active
in_lane: Callable[[Tensor], bool] = _functorch.is_functorch_wrapped_tensor
behind: Callable[[Tensor], Tensor] = _functorch.get_unwrapped  # unwraps one level; the lanes are axis `lane_axis`
lane_axis: Callable[[Tensor], int] = _functorch.maybe_get_bdim  # negative if the tensor is the same in all lanes


def of_all_lanes(tensor: Tensor) -> Tensor:
    """The values of all lanes [L, ...], or the tensor itself if it is the same in all lanes."""
    while in_lane(tensor):
        axis, tensor = lane_axis(tensor), behind(tensor)
        if axis > 0:
            tensor = tensor.movedim(axis, 0)
    return tensor


def in_lanes_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Wrap the values of all lanes [L, ...] as a tensor of one lane, in the vmapped call in which `like` is."""
    wrapped: Tensor = _functorch._add_batch_dim(tensor, 0, _functorch.maybe_get_level(like))
    return wrapped
