"""What rank 0 sends to all arrives where it is used: in the memory of a GPU, at once or through the host's."""

import numpy as np
import torch

from pflmpi import tree
from pflmpi.messages.packing import unpack, unpack_there
from pflmpi.transports.base import Transport
from pflmpi.tree import Tree


def broadcast(transport: Transport, content: np.ndarray | None, like: Tree, device: torch.device) -> Tree:
    """The tree shaped `like` on this rank's device.

    Args:
        content: on rank 0, its leaves packed; None elsewhere.
        device: of this rank; that of another one may be of another kind.
    """
    size = tree.num_bytes(like)
    if device.type == "cpu":
        buffer = np.empty(size, np.uint8) if content is None else content
        transport.broadcast(buffer)
        return unpack(buffer, like)
    direct = transport.takes_gpu_memory(size)
    if direct and content is None:
        there = torch.empty(size, dtype=torch.uint8, device=device)
        transport.broadcast(there)
        return unpack_there(there, like)
    # torch keeps pinned memory for the next round, and gives it out again once a copy from it has ended.
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    if content is not None:
        pinned.numpy()[:] = content
    if not direct:
        transport.broadcast(pinned.numpy())
    there = pinned.to(device, non_blocking=True)
    if direct:
        transport.broadcast(there)
    return unpack_there(there, like)
