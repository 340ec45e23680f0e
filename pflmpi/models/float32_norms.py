"""Norms computed in float32, for models in bfloat16 in lanes on a CPU."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_NORMS = (F.batch_norm, F.group_norm, F.instance_norm, F.layer_norm)


class Float32Norms(TorchFunctionMode):
    """Context in which norms take bfloat16 inputs in float32, with the same parameters.

    Under vmap PyTorch's CPU kernels refuse bfloat16 beside float32 (PyTorch 2.14).
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in _NORMS:
            return function(*args, **kwargs)
        x, *others = args
        normed: Tensor = function(x.float(), *others, **kwargs)
        return normed.to(x.dtype)
