"""Low-rank adapters for the layers of any torch module: Hu et al., LoRA, ICLR 2022."""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn import functional as F

from pflmpi.errors import ConfigError
from pflmpi.text import join_truncated

M = TypeVar("M", bound=nn.Module)

ADAPTERS = ("lora_a", "lora_b")  # names of the added parameters of a layer


class LoRALinear(nn.Linear):
    """x W^T + b + scale (x A^T) B^T, with `lora_a` [r, inputs] and `lora_b` [outputs, r]."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    scale: float

    def forward(self, x: Tensor) -> Tensor:
        """[..., outputs] for x: [..., inputs]."""
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


class _LoRAConv:
    """W * x + b + scale B * (A * x), with `lora_a` [r, inputs, kernel] and `lora_b` [outputs, r, 1, ...]."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """[B, outputs, ...] for x: [B, inputs, ...]."""
        low = self._conv_forward(x, self.lora_a, None)
        pointwise = getattr(F, f"conv{self.weight.ndim - 2}d")(low, self.lora_b)
        return self._conv_forward(x, self.weight, self.bias) + self.scale * pointwise  # type: ignore[no-any-return]


class LoRAConv1d(_LoRAConv, nn.Conv1d):
    """A convolution with an adapter."""


class LoRAConv2d(_LoRAConv, nn.Conv2d):
    """A convolution with an adapter."""


class LoRAConv3d(_LoRAConv, nn.Conv3d):
    """A convolution with an adapter."""


_ADAPTED: dict[type, type] = {
    nn.Linear: LoRALinear,
    nn.Conv1d: LoRAConv1d,
    nn.Conv2d: LoRAConv2d,
    nn.Conv3d: LoRAConv3d,
}


def lora(module: M, layers: Sequence[str], rank: int, alpha: float | None = None) -> M:
    """Adds low-rank adapters to linear and convolutional layers, freezes all else, and returns the module.

    A state dict gets NAME.lora_a and NAME.lora_b besides its other names, so that `model.weights` may be that of the
    module without adapters. A is initialised as PyTorch's layers are, B with zeros: at first the output is unchanged.

    Args:
        layers: patterns of the names of layers, such as "layer4.*"; matching layers of other types are left unchanged.
        rank: r, of the change of a weight.
        alpha: the adapter's output is scaled by alpha / r; None: r.

    Raises:
        ConfigError: a pattern matches no such layer, a convolution has groups, or the rank is not positive.

    >>> layer = lora(nn.Sequential(nn.Linear(4, 3)), ["0"], rank=2)[0]
    >>> [(name, [*value.shape]) for name, value in layer.named_parameters() if value.requires_grad]
    [('lora_a', [2, 4]), ('lora_b', [3, 2])]
    """
    if rank < 1:
        raise ConfigError(f"lora: rank = {rank}; must be at least 1")
    candidates = {name: layer for name, layer in module.named_modules() if type(layer) in _ADAPTED}
    for pattern in layers:
        if not any(fnmatchcase(name, pattern) for name in candidates):
            known = join_truncated([*candidates]) or "none"
            raise ConfigError(f"lora: {pattern!r} matches no nn.Linear or convolution of the module; known: {known}")
    module.requires_grad_(False)
    for name, layer in candidates.items():
        if any(fnmatchcase(name, pattern) for pattern in layers):
            if (groups := getattr(layer, "groups", 1)) != 1:
                raise ConfigError(f"lora: {name} has groups = {groups}, for which there is no adapter; leave it out")
            _adapt(layer, rank, rank if alpha is None else alpha)
    _leave_fast_path(module)
    return module


def _adapt(layer: Any, rank: int, alpha: float) -> None:
    """Turns a layer, in place, into one with an adapter that does not change its output yet."""
    outputs, inputs, *kernel = layer.weight.shape
    layer.__class__ = _ADAPTED[type(layer)]
    layer.lora_a = nn.Parameter(layer.weight.new_empty(rank, inputs, *kernel))
    layer.lora_b = nn.Parameter(layer.weight.new_zeros(outputs, rank, *[1] * len(kernel)))
    layer.scale = alpha / rank
    nn.init.kaiming_uniform_(layer.lora_a, a=math.sqrt(5))


def _leave_fast_path(module: nn.Module) -> None:
    """Lets encoders of PyTorch call their adapted layers in evaluation, where their fast path reads `weight` alone."""
    for encoder in module.modules():
        if any(isinstance(layer, LoRALinear) for layer in encoder.modules()):
            if isinstance(encoder, nn.TransformerEncoderLayer):
                encoder.activation_relu_or_gelu = 0
            if isinstance(encoder, nn.TransformerEncoder):
                encoder.use_nested_tensor = False
