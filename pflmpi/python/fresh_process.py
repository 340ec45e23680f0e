"""Resets torch's global settings for a run inside a process that may have changed them, such as a notebook."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils import deterministic

from pflmpi.errors import ConfigError


@contextmanager
def fresh_process() -> Iterator[None]:
    """Gives torch the settings of a new process; restores them and the random generators afterwards.

    Raises:
        ConfigError: torch's default device is not the CPU.
    """
    if torch.get_default_device().type != "cpu":
        raise ConfigError(f"in_process=True with torch's default device {torch.get_default_device()}; set it to None")
    devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)  # type: ignore[no-untyped-call]
    generators = random.getstate(), np.random.get_state()
    attributes = [(owner, name, getattr(owner, name), fresh) for owner, name, fresh in _list_attributes()]
    modes = torch.get_num_threads(), torch.get_default_dtype(), torch.get_deterministic_debug_mode()
    autocast = {device: torch.is_autocast_enabled(device) for device in ("cpu", "cuda")}
    environ = {name: os.environ.get(name) for name in _VARIABLES}
    try:
        with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
            _apply(modes[0], torch.float32, 0, dict.fromkeys(autocast, False))
            for owner, name, _, fresh in attributes:
                setattr(owner, name, fresh)
            yield
    finally:
        _apply(*modes, autocast)
        for owner, name, before, _ in attributes:
            setattr(owner, name, before)
        for name, value in environ.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        random.setstate(generators[0])
        np.random.set_state(generators[1])


_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_CACHE_DIR")  # set by `runtime.devices`


def _list_attributes() -> list[tuple[Any, str, object]]:
    """Settings of torch that are attributes, each with the value that a run needs."""
    backends: Any = torch.backends  # its type stubs lack them
    mkldnn, cudnn = backends.mkldnn, backends.cudnn
    kernels = (mkldnn.matmul, mkldnn.conv, mkldnn.rnn, cudnn.conv, cudnn.rnn, backends.cuda.matmul)
    switches = [(cudnn, "benchmark", False), (cudnn, "deterministic", False)]
    filled = (deterministic, "fill_uninitialized_memory", True)
    return [*((kernel, "fp32_precision", "ieee") for kernel in kernels), *switches, filled]


def _apply(threads: int, dtype: torch.dtype, mode: int, autocast: dict[str, bool]) -> None:
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.set_deterministic_debug_mode(mode)
    for device, enabled in autocast.items():
        torch.set_autocast_enabled(device, enabled)
