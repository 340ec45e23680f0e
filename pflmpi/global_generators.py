"""The global random generators of Python, NumPy and torch; only code from outside the package draws from them."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_LOCK = threading.RLock()  # ranks that are threads share the generators


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators inside the block, and restore their states after it."""
    with _LOCK, torch.random.fork_rng(devices=[]):
        python_state, numpy_state = random.getstate(), np.random.get_state()
        torch.manual_seed(seed % 2**63)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def read_states(on_gpu: bool) -> tuple[object, ...]:
    """The states of the generators, to detect draws; includes the GPU's if one is in use."""
    with _LOCK:
        numpy_state = np.random.get_state(legacy=False)["state"]
        return (
            torch.get_rng_state().numpy().tobytes(),
            torch.cuda.get_rng_state().numpy().tobytes() if on_gpu else b"",
            numpy_state["key"].tobytes(),
            numpy_state["pos"],
            random.getstate(),
        )
