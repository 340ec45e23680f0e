"""Reads folders of images: a folder for each class, below train/, val/ and test/ where these exist."""

import logging
import re
import warnings
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path

import numpy as np

from pflmpi.data.array_files import OwnArrays
from pflmpi.text import first_line

logger = logging.getLogger(__name__)

_SUFFIXES = (".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".gif", ".webp", ".pbm", ".pgm", ".ppm", ".tif", ".tiff")
_VALIDATION = ("val", "valid", "validation")
_SPLITS = ("train", *_VALIDATION, "test")
_HIDDEN = re.compile(r"\.|@eaDir$")  # names of files and folders that programs leave there; @eaDir has thumbnails
_16_BITS = re.compile(r"\w+;16(?=[BLN])")  # in PIL's names of what a file holds; it keeps the upper 8


def read_image_folder(path: Path) -> OwnArrays:
    """Reads the images of all classes; the names of their folders are the labels.

    Raises:
        ValueError: there are none, they differ in size or channels, or one cannot be read.
    """
    has_splits = (path / "train").is_dir()
    folders = [path / name for name in _SPLITS] if has_splits else [path]
    if has_splits:
        for other in sorted(path.iterdir()):
            if other not in folders and not _HIDDEN.match(other.name) and _find_images(other):
                raise ValueError(
                    f"there are pictures in {other.name}/ too; move them to train/, val/ or test/, or out of it"
                )
    files_by_split = {folder.name: _find_images(folder) for folder in folders}
    files = [file for split_files in files_by_split.values() for file in split_files]
    if not files:
        problem = f"there are no pictures in CLASS/*{{{','.join(_SUFFIXES)}}}"
        if tables := sorted(file.name for file in path.glob("*") if file.suffix in (".npz", ".csv")):
            problem += (
                f"; of files as {tables[0]} give one, with an array or column `client`, or write them as PFLlib does: "
                "train/0.npz and test/0.npz for client 0"
            )
        raise ValueError(problem)
    _warn_unread(path, folders, files)
    splits = np.repeat(
        [name if has_splits else "train" for name in files_by_split], [*map(len, files_by_split.values())]
    )
    return OwnArrays(
        x=read_images((str(file), file) for file in files),
        y=np.array([file.parent.name for file in files]),
        test=splits == "test",
        validation=np.isin(splits, _VALIDATION),
        layout="nchw",
    )


def find_image_classes(path: Path) -> list[str]:
    """Returns the names of the folders of classes, those below train/ where it exists."""
    folder = path / "train" if (path / "train").is_dir() else path
    return sorted({file.parent.name for file in _find_images(folder)})


def read_images(files: Iterable[tuple[str, Path | BytesIO]]) -> np.ndarray:
    """Reads files, each with its name, as images [n, C, H, W]; `ValueError` if one is damaged or of another size."""
    images: list[np.ndarray] = []
    for name, file in files:
        image = _read_image(name, file)
        if not images:
            first = name
        elif image.shape != images[0].shape:
            size, expected = ("x".join(map(str, array.shape)) for array in (image, images[0]))
            raise ValueError(f"{name} is {size} and {first} {expected}; make all pictures of one size and kind")
        images.append(image)
    channels_last = np.stack([np.atleast_3d(image) for image in images])
    return np.ascontiguousarray(channels_last.transpose(0, 3, 1, 2))


def _find_images(folder: Path) -> list[Path]:
    """Finds the pictures in the folders of classes."""
    return [file for file in _list_class_files(folder) if file.suffix.lower() in _SUFFIXES]


def _warn_unread(path: Path, folders: list[Path], files: list[Path]) -> None:
    """Warns of pictures that are not among the files read, and of other files in the folders of classes."""
    if unread := {file for file in path.rglob("*") if file.suffix.lower() in _SUFFIXES} - {*files}:
        logger.warning("not read: %d pictures that are hidden, or not directly in the folder of a class", len(unread))
    class_files = (file for folder in folders for file in _list_class_files(folder))
    if others := [f.relative_to(path) for f in class_files if f.suffix.lower() not in _SUFFIXES and f.is_file()]:
        logger.warning(
            "not read: %d files in folders of classes, such as %s; pictures end in %s",
            len(others),
            others[0],
            ", ".join(_SUFFIXES),
        )


def _list_class_files(folder: Path) -> list[Path]:
    """Lists what is in the folders of classes, and not hidden."""
    return sorted(f for f in folder.glob("*/*") if not _HIDDEN.match(f.name) and not _HIDDEN.match(f.parent.name))


def _read_image(name: str, file: Path | BytesIO) -> np.ndarray:
    """Reads an image as uint8, [H, W] if it is grey, else [H, W, 3]."""
    from PIL import Image  # comes with torchvision

    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(file) as image:
                deep = _16_BITS.search(str(image.tile))
                mode = deep.group() if deep else image.mode
                if deep or mode[0] in "IF":  # what is above 255 would be cut off
                    raise ValueError(f"it has more than 8 bits a channel (mode {mode}); scale it to 8")
                if (pages := getattr(image, "n_frames", 1)) > 1 and image.format != "MPO":  # a photo with its preview
                    raise ValueError(f"it has {pages} pages or frames; save each as a picture of its own")
                return np.asarray(image if image.mode in ("L", "RGB") else image.convert("RGB"))
        except MemoryError:
            raise
        except Exception as error:  # PIL raises a dozen kinds for damaged bytes
            raise ValueError(f"{name} cannot be read as a picture: {first_line(error)}") from error
