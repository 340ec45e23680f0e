"""Data of one's own: an .npz or .h5 file, a table as .csv, a folder of pictures, or one with files of each client."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pflmpi.data.array_files import read_h5, read_npz
from pflmpi.data.csv_table import read_table
from pflmpi.data.dataset import Dataset, as_numbers, assemble, first_missing
from pflmpi.data.pfllib import is_split_by_client, read_folder
from pflmpi.data.task_kinds import CLASSIFICATION, TaskKind
from pflmpi.errors import DataError

_HOW = (
    "give an .npz or .h5 with x and y (and client, test, validation, class_names), a .csv with a header and a column "
    "of labels, a folder with a folder of pictures for each class, or one as PFLlib writes it"
)
_MOST_CLASSES = 10_000
_OPTIONAL = ("client", "test", "validation", "class_names")  # arrays of a file


@dataclass(frozen=True)
class OwnArrays:
    """What a file or folder holds.

    Attributes:
        x: [n, ...].
        y: [n] labels of any kind.
        client: [n] whose samples they are, of any kind; None: not said.
        test: bool [n], for `data.split: official`.
        validation: bool [n], samples kept out of training that are none for testing; None: not said.
        num_classes: K, where y has numbers from 0 to K - 1; None: the classes are those in y.
        class_names: of the labels 0, 1, ..., or of the classes in sorted order; None: as in y, if it has texts.
        columns: what the values of a sample are called, in a table.
        layout: `nchw` or `nhwc`, where the file or the user says it.
    """

    x: np.ndarray
    y: np.ndarray
    client: np.ndarray | None
    test: np.ndarray
    num_classes: int | None = None
    class_names: np.ndarray | None = None
    columns: tuple[str, ...] = ()
    layout: str | None = None
    validation: np.ndarray | None = None


def read_own(
    path: Path,
    label: str | list[str] | None = None,
    client: str | None = None,
    layout: str | None = None,
    task_kind: TaskKind = CLASSIFICATION,
) -> Dataset:
    """The dataset in a file or folder.

    Samples of bytes are images: [n, H, W], [n, C, H, W], or [n, H, W, C] with 1 or 3 channels. All others become
    float32 of the shape that they have. Classes and clients are numbered in sorted order, texts that are numbers too.

    Args:
        label, client: columns of a table; None for those called so, and for the last one as the label.
        task_kind: what the labels are.
        layout: `nchw` or `nhwc`, the axes of arrays [n, ., ., .]; None where the shape leaves no doubt.

    Raises:
        DataError: there is no such file, or its content cannot be used.
    """
    if not path.exists():
        raise DataError(f"data.path = {str(path)!r} does not exist; {_HOW}")
    for key, column in (("label", label), ("client", client)):
        if column is not None and (path.is_dir() or path.suffix != ".csv"):
            raise DataError(f"data.{key} = {column!r} names a column of a .csv, and this is {path.name}; leave it out")
    if layout is not None and (path.suffix == ".csv" or (path.is_dir() and not is_split_by_client(path))):
        raise DataError(f"data.layout = {layout!r} is of arrays, and {path.name} holds none; leave it out")
    try:
        if path.is_dir():
            arrays = _folder(path)
        elif path.suffix == ".npz":
            arrays = _named(read_npz(path, ("x", "y"), _OPTIONAL))
        elif path.suffix in (".h5", ".hdf5"):
            arrays = _named(_h5(path))
        elif path.suffix == ".csv":
            arrays = _csv(path, label, client)
        else:
            raise DataError(f"data.path = {str(path)!r} has an unknown suffix; {_HOW}")
        return _dataset(path.stem, replace(arrays, layout=arrays.layout or layout), task_kind)
    except (OSError, ValueError) as error:
        raise DataError(f"data.path = {str(path)!r} cannot be used: {error}") from error
    except MemoryError as error:
        raise DataError(
            f"data.path = {str(path)!r} needs more memory than this process may have; allow it more (ulimit -v, --mem "
            "of a job), or use fewer samples"
        ) from error


def _dataset(name: str, arrays: OwnArrays, task_kind: TaskKind) -> Dataset:
    x, count = _samples(arrays.x, arrays.layout), len(arrays.x)
    sides = {"test": arrays.test, "validation": arrays.validation}
    for what, array in {"y": arrays.y, "client": arrays.client, **sides}.items():
        axes = None if what == "y" and not task_kind.classes else 1  # the others are for the kind of task to judge
        if array is not None and (array.shape[:1] != (count,) or axes not in (None, array.ndim)):
            raise ValueError(f"{what} has the shape {list(array.shape)}, and x has {count} samples; expected [{count}]")
    if not count:
        raise ValueError("it has no samples")
    arrays = replace(arrays, validation=_check_sides(arrays.test, arrays.validation))
    y = as_numbers(arrays.y)
    for what, values in (("label", y if task_kind.classes else None), ("client", arrays.client)):
        if values is not None and (lost := first_missing(values)) is not None:
            raise ValueError(f"sample {lost} has no {what} ({values[lost]}); give each sample one, or leave it out")
    clients, writers = (np.empty(0), None) if arrays.client is None else _clients(arrays.client)
    test = arrays.test.astype(bool)
    if task_kind.classes:
        dataset = _of_classes(name, x, y, test, writers, arrays)
    else:
        labels = task_kind.labels(y)
        about = (name, x, labels, test, task_kind.num_outputs(labels), writers)
        dataset = assemble(*about, official_validation=arrays.validation, task_kind=task_kind)
    return replace(
        dataset,
        written_clients=_texts(clients),
        may_be_tokens=arrays.x.dtype.kind in "iu" and x.dtype != np.uint8,
        columns=arrays.columns,
        task_kind=task_kind,
    )


def _of_classes(
    name: str, x: np.ndarray, y: np.ndarray, test: np.ndarray, writers: np.ndarray | None, arrays: OwnArrays
) -> Dataset:
    """The dataset of samples x with labels y [n] of any kind, which are classes."""
    classes, labels = np.unique(y, return_inverse=True)
    if len(classes) > _MOST_CLASSES or (y.dtype.kind == "f" and (classes != np.round(classes)).any()):
        raise ValueError(
            f"y has {len(classes)} different values, such as {classes[0].item()!r}; expected labels of classes, or "
            "data.task: regression for numbers"
        )
    if arrays.num_classes is not None:  # some of which no sample may be of
        classes, labels = np.arange(arrays.num_classes), y
    about = (name, x, labels.astype(np.int64), test, len(classes), writers)
    return replace(
        assemble(*about, official_validation=arrays.validation),
        class_names=_names(classes, arrays.class_names),
        written_labels=_texts(classes.astype(np.int64) if classes.dtype.kind in "biuf" else classes),
    )


def _clients(written: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The clients [N] in their order, by number where all are numbers, and whose each sample [n] is."""
    names, numbers = np.unique(written, return_inverse=True)
    values = as_numbers(names)
    if values is names or len(np.unique(values)) < len(names):  # as 7 and 007, or texts too long for a float
        return names, numbers
    order = np.argsort(values, kind="stable")
    return names[order], np.argsort(order)[numbers]


def _check_sides(test: np.ndarray, validation: np.ndarray | None) -> np.ndarray | None:
    """Which samples [n] are for validation, None if none is; raise `ValueError` where what they are for is unclear."""
    for name, marks in {"test": test, "validation": validation}.items():
        if marks is not None and (wrong := ~np.isin(marks, (0, 1))).any():
            bad = int(wrong.argmax())
            raise ValueError(f"sample {bad} has {name} = {marks[bad]}; allowed: 0, 1, true, false")
    if validation is None or not validation.any():
        return None
    if (both := test.astype(bool) & validation.astype(bool)).any():
        raise ValueError(f"sample {int(both.argmax())} is marked as test and as validation; choose one")
    return validation.astype(bool)


def _names(classes: np.ndarray, names: np.ndarray | None) -> tuple[str, ...]:
    """What the classes [K] are called."""
    if names is None:
        return () if classes.dtype.kind in "biuf" else _texts(classes)
    if names.ndim == 1 and len(names) == len(classes):
        return _texts(names)
    if names.ndim == 1 and classes.dtype.kind in "iuf" and classes.min() >= 0 and classes.max() < len(names):
        return _texts(names[classes.astype(np.int64)])
    raise ValueError(
        f"class_names has the shape {list(names.shape)}, and y has {len(classes)} classes, up to {classes[-1]}; "
        "give one name for each class, in the order of the labels"
    )


def _texts(values: np.ndarray) -> tuple[str, ...]:
    return tuple(value.decode() if isinstance(value, bytes) else str(value) for value in values.tolist())


def _samples(x: np.ndarray, layout: str | None) -> np.ndarray:
    if x.ndim < 2 or x.dtype.kind not in "biuf":
        raise ValueError(f"x is {x.dtype} {list(x.shape)}; expected numbers [n, ...]")
    if x.ndim == 4:
        x = x if (layout or _layout(x)) == "nchw" else np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    elif layout is not None:
        raise ValueError(f"data.layout = {layout!r} is of arrays [n, ., ., .], and x is {list(x.shape)}; leave it out")
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        return x[:, None] if x.ndim == 3 else x
    original = x
    with np.errstate(over="ignore"):  # refused below
        x = original.astype(np.float32)
    if (wrong := ~np.isfinite(x)).any():
        bad, value = np.nonzero(wrong)[0][0], original[wrong][0].item()
        if np.isfinite(value):
            raise ValueError(
                f"sample {bad} has the value {value!r}, too large for float32; scale it, or leave the sample out"
            )
        raise ValueError(f"sample {bad} has a value that is not a finite number; fill it in, or leave the sample out")
    return x


def _layout(x: np.ndarray) -> str:
    """The axes of samples: channels are first, in bytes also last.

    Raises:
        ValueError: they look as if they were elsewhere. Sides are often equal, and channels few.
    """
    _, first, middle, last = x.shape
    if (first == middle) != (middle == last):
        likely = "nhwc" if first == middle else "nchw"
    elif first == middle:  # a cube
        likely = "nchw" if first == 1 else ""
    elif (first <= 4) != (last <= 4):
        likely = "nhwc" if last <= 4 else "nchw"
    else:
        likely = "nchw" if first > 4 else ""
    if likely == ("nhwc" if x.dtype == np.uint8 and last in (1, 3) and first not in (1, 3) else "nchw"):
        return likely
    raise ValueError(
        f"x is {x.dtype} {list(x.shape)}, and may have its channels first or last; set data.layout (pflmpi data: "
        "--layout) to nchw or to nhwc"
    )


def _h5(path: Path) -> dict[str, np.ndarray]:
    arrays = read_h5(path, ("x", "y", *_OPTIONAL))
    for name in ("x", "y"):
        if name not in arrays:
            raise ValueError(f"no array {name!r} in it")
    return arrays


def _named(arrays: Mapping[str, np.ndarray]) -> OwnArrays:
    x, test = arrays["x"], arrays.get("test", np.zeros(len(arrays["x"]), bool))
    names, validation = arrays.get("class_names"), arrays.get("validation")
    return OwnArrays(x, arrays["y"], arrays.get("client"), test, class_names=names, validation=validation)


def _csv(path: Path, label: str | list[str] | None, client: str | None) -> OwnArrays:
    x, y, clients, sides, columns = read_table(path, label, client)
    test = sides.get("test", np.zeros(len(x), bool))
    return OwnArrays(x, y, clients, test, columns=columns, validation=sides.get("validation"))


def _folder(path: Path) -> OwnArrays:
    if is_split_by_client(path):
        return OwnArrays(*read_folder(path))
    pictures, labels, test = read_pictures(path)
    return OwnArrays(pictures, labels, None, test, layout="nhwc" if pictures.ndim == 4 else None)


_PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".pgm", ".ppm", ".tif", ".tiff")


def read_pictures(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The pictures [n, ...], the names of their folders [n], and whether they are for testing [n].

    Raises:
        ValueError: there are none, they are not of one size and kind, or one cannot be read.
    """
    sides = [path / name for name in ("train", "test")] if (path / "train").is_dir() else [path]
    if len(sides) > 1:
        for other in sorted(path.iterdir()):
            if other not in sides and other.is_dir() and _files(other):
                raise ValueError(f"there are pictures in {other.name}/ too; move them to train/ or test/, or out of it")
    entries = [
        (file, file.parent.name, side.name == "test" and len(sides) > 1) for side in sides for file in _files(side)
    ]
    if not entries:
        raise ValueError(f"there are no pictures in CLASS/*{{{','.join(_PICTURES)}}}")
    pictures = [_picture(file) for file, _, _ in entries]
    for (file, _, _), picture in zip(entries, pictures, strict=True):
        if picture.shape != pictures[0].shape:
            size, first = ("x".join(map(str, array.shape)) for array in (picture, pictures[0]))
            raise ValueError(f"{file} is {size} and {entries[0][0]} {first}; make all pictures of one size and kind")
    labels, test = np.array([label for _, label, _ in entries]), np.array([side for _, _, side in entries])
    return np.stack(pictures), labels, test


def _files(side: Path) -> list[Path]:
    return sorted(file for file in side.glob("*/*") if file.suffix.lower() in _PICTURES)


def _picture(file: Path) -> np.ndarray:
    from PIL import Image  # comes with torchvision

    if not file.is_file():
        raise ValueError(f"{file} is no regular file")

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
            raise ValueError(f"{file} cannot be read as a picture: {error}") from error
