"""Arrays from an .npz file, without pickles and with one kind of error."""

import zipfile
import zlib
from pathlib import Path

import numpy as np


def read_npz(path: Path, names: tuple[str, ...]) -> list[np.ndarray]:
    """The named arrays.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not an archive, or an array that is missing, damaged or pickled.
    """
    # Opened here: numpy leaves the file open when the archive is damaged.
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            raise ValueError("not an .npz archive, or cut short")
        try:
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                absent = [name for name in names if name not in archive]
                if absent:
                    raise ValueError(f"no array {absent[0]!r} in it")
                return [archive[name] for name in names]
        except (OSError, EOFError, KeyError, NotImplementedError, zlib.error, zipfile.BadZipFile) as error:
            raise ValueError(str(error) or type(error).__name__) from error
