"""The global generators of Python, NumPy and torch, from which only code from outside draws."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_LOCK = threading.RLock()  # ranks that are threads share them


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let what is drawn inside follow from `seed` alone; afterwards they go on as if nothing had been drawn."""
    with _LOCK, torch.random.fork_rng(devices=[]):
        before = random.getstate(), np.random.get_state()
        torch.manual_seed(seed % 2**63)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def states(on_gpu: bool) -> tuple[object, ...]:
    """Their states, to see whether something has been drawn; that of the GPU too, if there is one in use."""
    with _LOCK:
        numpy_state = np.random.get_state(legacy=False)["state"]
        return (
            torch.get_rng_state().numpy().tobytes(),
            torch.cuda.get_rng_state().numpy().tobytes() if on_gpu else b"",
            numpy_state["key"].tobytes(),
            numpy_state["pos"],
            random.getstate(),
        )
