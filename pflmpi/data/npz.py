"""Arrays from an .npz file, without pickles and with one kind of error."""

import zipfile
from pathlib import Path

import numpy as np

from pflmpi import machine
from pflmpi.text import first_line, size


def read_npz(path: Path, names: tuple[str, ...]) -> list[np.ndarray]:
    """The named arrays.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not an archive, or an array that is missing, damaged, pickled or larger than the memory.
    """
    if path.exists() and not path.is_file():
        raise ValueError("it is no regular file")
    # Opened here: numpy leaves the file open when the archive is damaged.
    with path.open("rb") as file:
        try:
            if not zipfile.is_zipfile(file):
                raise ValueError("not an .npz archive, or cut short")
            with zipfile.ZipFile(file) as archive:
                return [_array(archive, name) for name in names]
        except MemoryError:
            raise
        except Exception as error:  # zipfile, zlib and numpy raise a dozen kinds for damaged bytes
            raise ValueError(first_line(error)) from error


def _array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """An array whose file is not longer, unpacked, than its head says, nor than the memory."""
    if f"{name}.npy" not in archive.namelist():
        raise ValueError(f"no array {name!r} in it")
    length = archive.getinfo(f"{name}.npy").file_size
    check_memory(length)
    with archive.open(f"{name}.npy") as member:
        version = np.lib.format.read_magic(member)
        read_head = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_head(member)
        if dtype.hasobject:
            raise ValueError(f"the array {name!r} is pickled")
        if (found := member.tell() + int(np.prod(shape, dtype=object)) * dtype.itemsize) != length:
            raise ValueError(f"the array {name!r} has {length} bytes, and its head says {found}")
    with archive.open(f"{name}.npy") as member:
        return np.asarray(np.lib.format.read_array(member, allow_pickle=False))


def check_memory(length: int) -> None:
    """Raise `ValueError` for more bytes than this node has: a few kilobytes may unpack to terabytes."""
    if length > (most := machine.memory().total):
        raise ValueError(f"it unpacks to {size(length)}, and this node has {size(most)} of memory")
