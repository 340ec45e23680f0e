"""What an MPI library says of GPU memory, by libraries that are not there."""

import ctypes
from typing import Any

import pytest

from pflmpi.transports import mpi_library


class Library:
    """The C functions of a library that answers 1 or 0, by one function or the other, or has neither."""

    def __init__(self, started: bool = True, open_mpi: int | None = None, other: int | None = None) -> None:
        self._started = started
        if open_mpi is not None:
            self.MPIX_Query_cuda_support = lambda: open_mpi
        if other is not None:
            self.MPIX_GPU_query_support = lambda kind, answer: self._set(answer, other) if kind == 0 else 1

    def MPI_Initialized(self, answer: Any) -> int:
        return self._set(answer, self._started)

    def _set(self, answer: Any, value: int) -> int:
        ctypes.cast(answer, ctypes.POINTER(ctypes.c_int))[0] = value
        return 0


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        (Library(open_mpi=1), True),
        (Library(open_mpi=0), False),
        (Library(other=1), True),
        (Library(other=0), False),
        (Library(open_mpi=0, other=1), False),
        (Library(), None),
        (Library(started=False, open_mpi=1), None),  # Open MPI decides when it starts
    ],
    ids=["yes", "no", "yes by the other function", "no by it", "no by the first", "absent", "not started"],
)
def test_a_library_is_asked_for_gpu_memory(library, expected):
    assert mpi_library._device_buffers(library) is expected
