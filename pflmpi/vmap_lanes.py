"""What is behind a lane of `torch.vmap`: the one file with PyTorch's private functions for that (2.14).

Inside a vmapped call a tensor shows what one client has; behind it are the values of all lanes. What `vmap` cannot do,
or does in more operations, is done there.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

_functorch = torch._C._functorch

outside_vmap = temporarily_clear_interpreter_stack  # with this, operations are on what is behind the lanes
in_vmap: Callable[[], bool] = torch._C._are_functorch_transforms_active
in_lane: Callable[[Tensor], bool] = _functorch.is_functorch_wrapped_tensor
behind: Callable[[Tensor], Tensor] = _functorch.get_unwrapped  # one level of it; the lanes are its axis `lane_axis`
lane_axis: Callable[[Tensor], int] = _functorch.maybe_get_bdim  # negative if the tensor is the same in all lanes


def of_all_lanes(tensor: Tensor) -> Tensor:
    """The values of all lanes [L, ...] behind those of one, or the tensor if it is the same in all."""
    while in_lane(tensor):
        axis, tensor = lane_axis(tensor), behind(tensor)
        if axis > 0:
            tensor = tensor.movedim(axis, 0)
    return tensor


def in_lanes_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Values of all lanes [L, ...] as one lane has them, in the call in which `like` is in a lane."""
    shown: Tensor = _functorch._add_batch_dim(tensor, 0, _functorch.maybe_get_level(like))
    return shown
