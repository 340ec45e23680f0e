"""Memory of a GPU in a transport's calls; torch is imported only where there is some."""

from typing import TYPE_CHECKING, TypeAlias, Union

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

Buffer: TypeAlias = Union[np.ndarray, "Tensor"]  # on the host, or a tensor anywhere

LEAST = 1 << 16  # bytes; a smaller message takes longer to and from a GPU than between hosts


def wait_for_kernels(buffer: Buffer) -> None:
    """Wait for the kernels that use this memory: a library that is not CUDA's own keeps no order with them."""
    if not isinstance(buffer, np.ndarray) and buffer.is_cuda:
        import torch

        torch.cuda.current_stream(buffer.device).synchronize()


def check_bytes(buffer: Buffer) -> None:
    """Assert that a buffer is uint8 [M] and contiguous."""
    if isinstance(buffer, np.ndarray):
        assert buffer.dtype == np.uint8 and buffer.ndim == 1, f"uint8 [M], not {buffer.dtype} {buffer.shape}"
        assert buffer.flags.c_contiguous, "a contiguous buffer"
    else:
        assert buffer.element_size() == 1 and buffer.ndim == 1, f"uint8 [M], not {buffer.dtype} {buffer.shape}"
        assert buffer.is_contiguous(), "a contiguous buffer"
