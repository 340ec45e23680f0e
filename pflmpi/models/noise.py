"""Random numbers that depend on a key alone, for dropout and for algorithms that draw noise."""

import math

import torch
from torch import Tensor

_LAYER_STEP = 0x632BE59BD9B4E019  # between the keys of two layers: an odd number of 63 bits
_CALL_STEP = 0x2545F4914F6CDD1D  # between the keys of two calls of a layer


def uniform(key: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """Returns numbers in (0, 1), float32, that depend on a key alone: the same on every device and in every lane.

    They are a hash (splitmix64) of the key and the position in `shape`. 23 bits of it are kept, so that neither 0 nor 1
    occurs. The first axis may be padded: earlier rows do not depend on how many follow.

    Args:
        key: [] int64, such as `Batch.key` in training, which is drawn for algorithms that set `draws_noise`.
        shape: of the result; its positions are numbered row by row.
    """
    if key is None:
        raise ValueError("the batch has no key for `uniform`; set draws_noise: ClassVar[bool] = True in the algorithm")
    count = math.prod(shape)
    state = key + _signed(0x9E3779B97F4A7C15) * torch.arange(1, count + 1, device=key.device)
    state = (state ^ _shift(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shift(state, 27)) * _signed(0x94D049BB133111EB)
    state = state ^ _shift(state, 31)
    return ((_shift(state, 41).float() + 0.5) * 2**-23).view(shape)


def derive_key(key: Tensor, number: int) -> Tensor:
    """Derives another key for each of several uses of one, such as the dropout layers of a model."""
    return key + (number + 1) * _LAYER_STEP % (1 << 62)


def apply_dropout(x: Tensor, key: Tensor, p: float, layer: int, call: int = 0) -> Tensor:
    """Drops entries of x [B, ...] with probability p and scales the others by 1 / (1 - p).

    Dropout layers of a model, and calls of one in a forward pass, are numbered, so that each has masks of its own.
    """
    key = derive_key(key, layer)
    if call:
        key = key + call * _CALL_STEP % (1 << 62)
    kept = uniform(key, tuple(x.shape)) >= p
    return x * kept / (1 - p)


def _shift(values: Tensor, bits: int) -> Tensor:
    """Shifts int64 values right as if they were unsigned."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """Returns the int64 with the bits of an unsigned number."""
    return value - (1 << 64) if value >= 1 << 63 else value
