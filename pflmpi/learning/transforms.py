"""Random augmentation of training samples on the device, by name or as a user's function.

    f(x [B, ...] in the dataset's form, key [] int64) -> the changed samples, of the same shape and type

`key` is drawn for each batch from the client's own stream and is the only source of randomness (`uniform`), so that
the bits are the same on any number of ranks, in loop and in lanes. Test samples are never transformed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pflmpi import global_generators, outside
from pflmpi.errors import ConfigError
from pflmpi.models.noise import derive_key, uniform
from pflmpi.registry import Registry, accept_function

Function = Callable[[Tensor, Tensor], Tensor]
TRIED_KEYS = torch.arange(-8, 8) * (1 << 59) + torch.arange(16)  # of both signs and all residues, as those of a run
_MOST_TRIED, _TRIED_BYTES = 64, 2**18  # samples with each key, and their bytes


def horizontal_flip(x: Tensor, key: Tensor) -> Tensor:
    """Half of the images mirrored, left to right."""
    _require_images("horizontal_flip", x)
    mirrored = uniform(key, (len(x),)) < 0.5
    return torch.where(mirrored.view(-1, 1, 1, 1), x.flip(-1), x)


def random_crop(x: Tensor, key: Tensor) -> Tensor:
    """Images shifted by up to an eighth of a side, padded with zeros.

    Equal to a crop of the image padded by an eighth on each side: 4 pixels for 32x32.
    """
    _require_images("random_crop", x)
    draws = uniform(key, (len(x), 2))
    return _shift(_shift(x, -2, draws[:, 0]), -1, draws[:, 1])


TRANSFORMS: Registry[Function] = Registry(
    "transform",
    {"horizontal_flip": horizontal_flip, "random_crop": random_crop},
    accept=accept_function("x", "key", returns="changed samples of the same shape and type"),
)


@dataclass(frozen=True)
class Transform:
    """Transforms applied in order, each with its own key."""

    functions: tuple[Function, ...]  # of the names in `data.transform`

    def __call__(self, x: Tensor, key: Tensor) -> Tensor:
        for number, function in enumerate(self.functions):
            x = function(x, derive_key(key, number))
        return x


def load_transform(names: Sequence[str], samples: Tensor, batch_size: int) -> Transform | None:
    """The transforms with these names, called with a batch of such samples [n, ...]; None without names.

    Raises:
        ConfigError: one fails on such samples, or changes their shape or type.
    """
    functions, batch = [TRANSFORMS[name] for name in names], _batch(samples, batch_size)
    for name, function in zip(names, functions, strict=True):
        with outside.as_config_error():
            _call(name, function, batch, TRIED_KEYS[0])  # what it makes at its first call may draw
    return Transform(tuple(functions)) if names else None


def check_draws(names: Sequence[str], samples: Tensor, batch_size: int) -> None:
    """Raises `ConfigError` if a transform from outside draws random numbers of its own; see `load_transform`."""
    batch = _batch(samples, batch_size)
    for name in names:
        if TRANSFORMS.reference(name) is not None:
            with outside.as_config_error():
                _check_draws(name, TRANSFORMS[name], batch)


def _batch(samples: Tensor, batch_size: int) -> Tensor:
    num_samples = min(batch_size, _MOST_TRIED, max(2, _TRIED_BYTES // samples[:1].nbytes))
    return samples[torch.arange(num_samples) % len(samples)]


def _call(name: str, function: Function, samples: Tensor, key: Tensor) -> Tensor:
    """Calls a function, which may change samples in place; raises `ConfigError` for a wrong shape or type."""
    changed = function(samples.clone(), key)
    if not isinstance(changed, Tensor) or (changed.shape, changed.dtype) != (samples.shape, samples.dtype):
        described = f"{changed.dtype} {list(changed.shape)}" if isinstance(changed, Tensor) else type(changed).__name__
        expected = f"{samples.dtype} {list(samples.shape)}"
        raise ConfigError(f"transform {name} makes {described} of samples {expected}; expected the same shape and type")
    return changed


def _check_draws(name: str, function: Function, samples: Tensor) -> None:
    """Raises `ConfigError` if a function draws random numbers of its own."""
    generators = global_generators.read_states(on_gpu=False)
    for key in TRIED_KEYS:
        once, again = (_call(name, function, samples, key) for _ in range(2))
        if not torch.equal(once, again) or global_generators.read_states(on_gpu=False) != generators:
            raise ConfigError(
                f"transform {name} makes other samples of the same samples and key; draw random numbers by "
                "pflmpi.models.noise.uniform(key, shape) alone"
            )


def _shift(x: Tensor, axis: int, draws: Tensor) -> Tensor:
    """Images shifted along an axis by draws [B] from 0 to 1."""
    side = x.shape[axis]
    max_shift = max(1, side // 8)
    shift = (draws * (2 * max_shift + 1)).long() - max_shift
    source = torch.arange(side, device=x.device) + shift.unsqueeze(1)  # [B, side]
    shape = (len(x), 1, side, 1) if axis == -2 else (len(x), 1, 1, side)
    index = source.clamp(0, side - 1).view(shape).expand(x.shape)
    return x.gather(axis, index) * ((source >= 0) & (source < side)).view(shape).to(x.dtype)


def _require_images(name: str, x: Tensor) -> None:
    if x.dim() != 4:
        shape = "x".join(map(str, x.shape[1:]))
        raise ConfigError(f"transform {name} takes images, CxHxW; the samples are {shape}; leave it out")
