"""Puts a caller's modes of torch aside, which hold for its thread."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def fresh_modes() -> Iterator[None]:
    """Gives this thread torch's modes of a new process: gradients, no autocast, tensors on the CPU."""
    autocast = [(device, torch.is_autocast_enabled(device)) for device in ("cpu", "cuda")]
    # None where it is the CPU already: in the context of a device some layers choose other kernels.
    device = torch.device("cpu") if torch.get_default_device().type != "cpu" else nullcontext()
    try:
        with torch.inference_mode(False), torch.enable_grad(), device:
            for kind, _ in autocast:
                torch.set_autocast_enabled(kind, False)
            yield
    finally:
        for kind, enabled in autocast:
            torch.set_autocast_enabled(kind, enabled)
