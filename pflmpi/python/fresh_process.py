"""Resets torch's global settings for a run inside a process that may have changed them, such as a notebook."""

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils import deterministic

from pflmpi.errors import ConfigError
from pflmpi.runtime.fresh_modes import fresh_modes

_run_lock = threading.RLock()  # of the thread whose run has the settings of this process; `on_round` may start a run


@contextmanager
def fresh_process() -> Iterator[None]:
    """Gives torch the settings of a new process; restores them and the random generators afterwards.

    Raises:
        ConfigError: torch's default device is not the CPU, or another thread is in this context.
    """
    if torch.get_default_device().type != "cpu":
        raise ConfigError(f"in_process=True with torch's default device {torch.get_default_device()}; set it to None")
    if not _run_lock.acquire(blocking=False):
        raise ConfigError(
            "in_process=True while a run with in_process=True is going on in another thread, and torch's settings are "
            "those of the whole process; leave in_process out, or start one run after the other"
        )
    try:
        with _fresh_settings():
            yield
    finally:
        _run_lock.release()


@contextmanager
def _fresh_settings() -> Iterator[None]:
    devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)  # type: ignore[no-untyped-call]
    generators = random.getstate(), np.random.get_state()
    settings = [(put, get(), fresh) for get, put, fresh in _list_settings()]
    environ = {name: os.environ.get(name) for name in _VARIABLES}
    try:
        with torch.random.fork_rng(devices), fresh_modes():
            for put, _, fresh in settings:
                put(fresh)
            yield
    finally:
        for put, before, _ in settings:
            put(before)
        for name, value in environ.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        random.setstate(generators[0])
        np.random.set_state(generators[1])


_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_CACHE_DIR")  # set by `runtime.devices`
_Setting = tuple[Callable[[], Any], Callable[[Any], object], Any]


def _list_settings() -> list[_Setting]:
    """Settings of torch that change bits: how each is read and set, and the value that a run needs."""
    backends: Any = torch.backends  # its type stubs lack most of them
    mkldnn, cudnn, cuda = backends.mkldnn, backends.cudnn, backends.cuda

    def attribute(owner: Any, name: str, fresh: object) -> _Setting:
        return partial(getattr, owner, name), partial(setattr, owner, name), fresh

    return [
        (torch.get_num_threads, torch.set_num_threads, torch.get_num_threads()),  # set by `runtime.devices`
        (torch.get_default_dtype, torch.set_default_dtype, torch.float32),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 0),
        *(
            attribute(kernel, "fp32_precision", "ieee")
            for kernel in (mkldnn.matmul, mkldnn.conv, mkldnn.rnn, cudnn.conv, cudnn.rnn, cuda.matmul)
        ),
        attribute(mkldnn, "enabled", True),
        attribute(cudnn, "enabled", True),
        attribute(cudnn, "benchmark", False),
        attribute(cudnn, "deterministic", False),
        attribute(backends.opt_einsum, "enabled", backends.opt_einsum.is_available()),
        attribute(deterministic, "fill_uninitialized_memory", True),
        (backends.mha.get_fastpath_enabled, backends.mha.set_fastpath_enabled, True),
        (cuda.flash_sdp_enabled, cuda.enable_flash_sdp, True),  # on CPUs too, as the next two
        (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp, True),
        (cuda.math_sdp_enabled, cuda.enable_math_sdp, True),
        (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp, True),
    ]
