"""Room for the rows of clients, in memory or in a mapped file; it takes up nothing but what is written."""

import mmap
import os
import tempfile
import weakref
from pathlib import Path

import numpy as np
import torch

from pflmpi import atomic
from pflmpi.errors import ConfigError, RunError
from pflmpi.runtime.config import RuntimeConfig
from pflmpi.text import size


class Storage:
    """Bytes that are zero until they are written.

    A file has no name, so that it is gone when the process is, however that ends.

    Attributes:
        bytes: [rows, row_bytes] uint8.

    Args:
        folder: of the file; None for memory.

    Raises:
        ConfigError: there cannot be as much.
    """

    def __init__(self, rows: int, row_bytes: int, folder: Path | None = None) -> None:
        self._folder = folder
        self._file: int | None = None
        length = rows * row_bytes
        try:
            if folder is not None:
                with tempfile.TemporaryFile(dir=folder) as file:
                    self._file = os.dup(file.fileno())
                weakref.finalize(self, os.close, self._file)
            flat = torch.frombuffer(_mapped(self._file, max(length, 1)), dtype=torch.uint8)
        except OSError as error:
            where, cure = "memory", "set runtime.state=disk"
            if folder is not None:
                where, cure = str(folder), "name another folder as runtime.scratch"
            raise ConfigError(
                f"the state of the clients of this rank, up to {size(length)}, cannot be kept in {where}: "
                f"{error.strerror}; {cure}, or use more nodes"
            ) from error
        self.bytes = flat[:length].view(rows, row_bytes)

    def reserve(self, rows: np.ndarray, start: int, end: int) -> None:
        """Make sure that these bytes of rows have room: a process ends that writes to a mapped file on a full disk.

        Raises:
            RunError: they have not.
        """
        if self._file is None or start == end:
            return
        for row in rows.tolist():
            try:
                os.posix_fallocate(self._file, row * self.bytes.shape[1] + start, end - start)
            except OSError as error:
                raise RunError(
                    f"{error.strerror} while the state of clients was written in {self._folder}, because of "
                    f"runtime.state = 'disk'; {atomic.remedy(error)}, or name another folder as runtime.scratch, and "
                    "resume the run"
                ) from error


def folder_of(runtime: RuntimeConfig, run: Path) -> Path | None:
    """The folder of the file that holds the state of the clients of a run; None where memory does."""
    if runtime.state == "memory":
        return None
    return run if runtime.scratch is None else Path(os.path.expandvars(runtime.scratch)).expanduser()


def check_scratch(runtime: RuntimeConfig) -> None:
    """Raise `ConfigError` unless `runtime.state` and `runtime.scratch` can be had here."""
    if runtime.state == "disk" and not hasattr(os, "posix_fallocate"):
        raise ConfigError("runtime.state = 'disk' needs posix_fallocate, which this system has not; use 'memory'")
    if runtime.scratch is None:
        return
    named = f"runtime.scratch = {runtime.scratch!r}"
    folder = folder_of(runtime, Path())
    if folder is None:
        raise ConfigError(f"{named} is for runtime.state = 'disk', which is 'memory'; set that, or leave scratch out")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "cannot be written" if folder.is_dir() else "is no folder"
        raise ConfigError(f"{named}: {folder} {why} here; name one that every node has and this user may write to")


def _mapped(file: int | None, length: int) -> mmap.mmap:
    if file is not None:
        os.truncate(file, length)
        return mmap.mmap(file, length)
    found = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # one row would take 2 MiB
        found.madvise(mmap.MADV_NOHUGEPAGE)
    return found
