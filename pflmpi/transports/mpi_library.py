"""The MPI library loaded in this process, queried through its C functions, because mpi4py has no such calls."""

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path

_LIBRARY = re.compile(r"/libmpi(ch)?(_\w+)?\.so[\d.]*$")
_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA in MPICH's mpi.h
_MAX_VERSION_BYTES = 8192  # bytes of a version text; MPICH's, the longest, is documented to be at most that


@dataclass(frozen=True)
class MpiLibrary:
    """An MPI library.

    Attributes:
        name: with its version, such as "Open MPI 5.0.11".
        device_buffers: whether it can send GPU memory; None if it does not say, or is not initialised yet.
    """

    name: str
    device_buffers: bool | None


def loaded() -> MpiLibrary | None:
    """The library loaded in this process; None if there is none."""
    library = open_library()
    if library is None:
        return None
    return MpiLibrary(_read_name(library), _query_device_buffers(library))


def open_library() -> ctypes.CDLL | None:
    """Opens the library loaded in this process; returns None if there is none."""
    path = _find_path()
    return None if path is None else ctypes.CDLL(path)


def short_name(text: str) -> str:
    """Returns name and version from a library's version text.

    >>> short_name("Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11")
    'Open MPI 5.0.11'
    >>> short_name("MPICH Version:      5.0.2\\nMPICH Release date: unreleased")
    'MPICH 5.0.2'
    """
    first = re.split(r"[,\n]", text.strip())[0]
    return re.sub(r"\s*\bversion:?\s*|\s+v(?=\d)", " ", first, flags=re.IGNORECASE).strip()


def _find_path() -> str | None:
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    return next((line.split()[-1] for line in mapped.splitlines() if _LIBRARY.search(line)), None)


def _read_name(library: ctypes.CDLL) -> str:
    text, length = ctypes.create_string_buffer(_MAX_VERSION_BYTES), ctypes.c_int()
    library.MPI_Get_library_version(text, ctypes.byref(length))  # one of the few calls allowed before MPI_Init
    return short_name(text.value.decode(errors="replace"))


def _query_device_buffers(library: ctypes.CDLL) -> bool | None:
    started = ctypes.c_int()
    library.MPI_Initialized(ctypes.byref(started))
    if not started.value:
        return None
    if hasattr(library, "MPIX_Query_cuda_support"):  # Open MPI, MPICH
        return bool(library.MPIX_Query_cuda_support())
    if hasattr(library, "MPIX_GPU_query_support"):  # some that are derived from MPICH
        supported = ctypes.c_int()
        return library.MPIX_GPU_query_support(_CUDA, ctypes.byref(supported)) == 0 and bool(supported.value)
    return None
