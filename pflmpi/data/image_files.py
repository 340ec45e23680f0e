"""Folders of pictures: a folder for each class, below train/, val/ and test/ where these exist."""

import logging
import warnings
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path

import numpy as np

from pflmpi.data.array_files import OwnArrays

logger = logging.getLogger(__name__)

_PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".pgm", ".ppm", ".tif", ".tiff")
_VALIDATION = ("val", "valid", "validation")
_SIDES = ("train", *_VALIDATION, "test")


def read_pictures(path: Path) -> OwnArrays:
    """The pictures, with the names of their folders as labels.

    Raises:
        ValueError: there are none, they are not of one size and kind, or one cannot be read.
    """
    sides = [path / name for name in _SIDES] if (path / "train").is_dir() else [path]
    if len(sides) > 1:
        for other in sorted(path.iterdir()):
            if other not in sides and other.is_dir() and _files(other):
                raise ValueError(
                    f"there are pictures in {other.name}/ too; move them to train/, val/ or test/, or out of it"
                )
    marked = len(sides) > 1
    entries = [(file, file.parent.name, side.name if marked else "train") for side in sides for file in _files(side)]
    if not entries:
        problem = f"there are no pictures in CLASS/*{{{','.join(_PICTURES)}}}"
        if tables := sorted(file.name for file in path.glob("*") if file.suffix in (".npz", ".csv")):
            problem += (
                f"; of files as {tables[0]} give one, with an array or column `client`, or write them as PFLlib does: "
                "train/0.npz and test/0.npz for client 0"
            )
        raise ValueError(problem)
    if unread := {*_pictures(path.rglob("*"))} - {file for file, _, _ in entries}:
        logger.warning("not read: %d pictures that are not directly in the folder of a class", len(unread))
    labels, names = np.array([label for _, label, _ in entries]), np.array([side for _, _, side in entries])
    x = stacked((str(file), file) for file, _, _ in entries)
    return OwnArrays(x, labels, test=names == "test", validation=np.isin(names, _VALIDATION), layout="nchw")


def stacked(files: Iterable[tuple[str, Path | BytesIO]]) -> np.ndarray:
    """The pictures [n, C, H, W] of files, each with its name.

    Raises:
        ValueError: one cannot be read, or is not of the size and kind of the first.
    """
    pictures: list[np.ndarray] = []
    for name, file in files:
        picture = _picture(name, file)
        if not pictures:
            first = name
        elif picture.shape != pictures[0].shape:
            size, expected = ("x".join(map(str, array.shape)) for array in (picture, pictures[0]))
            raise ValueError(f"{name} is {size} and {first} {expected}; make all pictures of one size and kind")
        pictures.append(picture)
    channels_last = np.stack([np.atleast_3d(picture) for picture in pictures])
    return np.ascontiguousarray(channels_last.transpose(0, 3, 1, 2))


def _files(side: Path) -> list[Path]:
    return sorted(_pictures(side.glob("*/*")))


def _pictures(files: Iterable[Path]) -> list[Path]:
    return [file for file in files if file.suffix.lower() in _PICTURES]


def _picture(name: str, file: Path | BytesIO) -> np.ndarray:
    from PIL import Image  # comes with torchvision

    if isinstance(file, Path) and not file.is_file():
        raise ValueError(f"{name} is no regular file")

    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(file) as image:
                if image.mode[0] in "IF":  # what is above 255 would be cut off
                    raise ValueError(f"it has more than 8 bits a channel (mode {image.mode}); scale it to 8")
                return np.asarray(image if image.mode in ("L", "RGB") else image.convert("RGB"))
        except (
            OSError,
            ValueError,
            SyntaxError,
            Image.DecompressionBombWarning,
            Image.DecompressionBombError,
        ) as error:
            raise ValueError(f"{name} cannot be read as a picture: {error}") from error
