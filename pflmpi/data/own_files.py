"""Data of one's own: an .npz or .h5 file, a table, a folder of pictures, or one in the format of other packages."""

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from pflmpi.data.array_files import OwnArrays, h5_names, joined, npz_names, read_h5, read_npz
from pflmpi.data.csv_table import read_table
from pflmpi.data.dataset import Dataset, as_numbers, assemble, first_missing, indistinct
from pflmpi.data.hugging_face import is_hugging_face, read_hugging_face
from pflmpi.data.image_files import read_pictures
from pflmpi.data.leaf import is_leaf, read_leaf
from pflmpi.data.pfllib import is_split_by_client, read_folder
from pflmpi.data.task_kinds import CLASSIFICATION, TaskKind
from pflmpi.errors import DataError
from pflmpi.text import join_truncated

logger = logging.getLogger(__name__)

_HOW = (
    "give an .npz or .h5 with x and y (and client, test, validation, class_names), a .csv with a header and a column "
    "of labels, a folder with a folder of pictures for each class, or one as PFLlib, LEAF or datasets writes it"
)
_MOST_CLASSES = 10_000
_OPTIONAL = ("client", "test", "validation", "class_names")  # arrays of a file
_SIDES = ("train", "val", "test")
_BY_SIDE = [  # instead of x and y of all samples, those of each side, as MedMNIST and Keras call them
    {side: (x.format(side), y.format(side)) for side in _SIDES}
    for x, y in (("{}_images", "{}_labels"), ("x_{}", "y_{}"))
]


def read_own(
    path: Path,
    label: str | list[str] | None = None,
    client: str | None = None,
    layout: str | None = None,
    task_kind: TaskKind = CLASSIFICATION,
) -> Dataset:
    """The dataset in a file or folder.

    Samples of bytes are images: [n, H, W], [n, C, H, W], or [n, H, W, C] with 1 or 3 channels. All others become
    float32 of the shape that they have, with a layout with their channels first. Classes and clients are numbered in
    sorted order, texts that are numbers too.

    Args:
        label, client: columns of a table; None for those called so, and for the last other one as the label.
        task_kind: what the labels are.
        layout: `nchw` or `nhwc`, whether arrays [n, ., ., .] or numbers [n, ., .] have their channels first or last;
            None where the shape leaves no doubt, or for sequences as they are.

    Raises:
        DataError: there is no such file, or its content cannot be used.
    """
    if not path.exists():
        raise DataError(f"data.path = {str(path)!r} does not exist; {_HOW}")
    columns = path.suffix == ".csv" or is_hugging_face(path)
    for key, column in (("label", label), ("client", client)):
        if column is not None and not columns:
            raise DataError(f"data.{key} = {column!r} names a column of a table, and this is {path.name}; leave it out")
    if layout is not None and not may_hold_arrays(path):
        raise DataError(f"data.layout = {layout!r} is of arrays, and {path.name} holds none; leave it out")
    try:
        if is_hugging_face(path):
            arrays = read_hugging_face(path, label, client)
        elif path.is_dir():
            arrays = _folder(path)
        elif path.suffix == ".npz":
            arrays = _named(npz_names(path), lambda names: read_npz(path, (), names))
        elif path.suffix in (".h5", ".hdf5"):
            arrays = _named(h5_names(path), lambda names: read_h5(path, names))
        elif path.suffix == ".csv":
            arrays = read_table(path, label, client)
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


def may_hold_arrays(path: Path) -> bool:
    """Whether data in a file or folder may have axes that a layout tells; not a table or pictures."""
    if path.is_dir():
        return is_split_by_client(path) or is_leaf(path) or is_hugging_face(path)
    return path.suffix != ".csv"


def has_unclear_channels(images: np.ndarray, layout: str | None) -> bool:
    """Whether data of one's own are sequences of which nobody has said if their channels are first or last."""
    return images.ndim == 3 and layout is None


def _dataset(name: str, arrays: OwnArrays, task_kind: TaskKind) -> Dataset:
    if task_kind.classes and arrays.y.ndim == 2 and arrays.y.shape[1] == 1:
        arrays = replace(arrays, y=arrays.y[:, 0])
    x, count = _samples(arrays.x, arrays.layout), len(arrays.x)
    sides = {"test": arrays.test, "validation": arrays.validation}
    for what, array in {"y": arrays.y, "client": arrays.client, **sides}.items():
        axes = None if what == "y" and not task_kind.classes else 1  # the others are for the kind of task to judge
        if array is not None and (array.shape[:1] != (count,) or axes not in (None, array.ndim)):
            one_hot = "one-hot? save y.argmax(1); " if what == "y" and _is_one_hot(array) else ""
            several = f" ({one_hot}several labels: data.task; pflmpi data: --task)" if what == "y" else ""
            raise ValueError(
                f"{what} has the shape {list(array.shape)}, and x has {count} samples; expected [{count}]{several}"
            )
    if not count:
        raise ValueError("it has no samples")
    test = np.zeros(count, bool) if arrays.test is None else arrays.test
    arrays, test = replace(arrays, validation=_check_sides(test, arrays.validation)), test.astype(bool)
    y = as_numbers(arrays.y)
    for what, values in (("label", y if task_kind.classes else None), ("client", arrays.client)):
        if values is not None and (lost := first_missing(values)) is not None:
            raise ValueError(f"sample {lost} has no {what} ({values[lost]}); give each sample one, or leave it out")
    clients, writers = (np.empty(0), None) if arrays.client is None else _clients(arrays.client)
    if task_kind.classes:
        dataset = _of_classes(name, x, y, test, writers, arrays)
    else:
        labels = task_kind.labels(y)
        about = (name, x, labels, test, task_kind.num_outputs(labels), writers)
        dataset = assemble(*about, official_validation=arrays.validation, task_kind=task_kind)
    return replace(
        dataset,
        written_clients=_client_names(clients),
        may_be_tokens=arrays.x.dtype.kind in "iu" and x.dtype != np.uint8,
        columns=arrays.columns,
        label_columns=arrays.label_columns,
        task_kind=task_kind,
    )


def _of_classes(
    name: str, x: np.ndarray, y: np.ndarray, test: np.ndarray, writers: np.ndarray | None, arrays: OwnArrays
) -> Dataset:
    """The dataset of samples x with labels y [n] of any kind, which are classes."""
    _check_distinct(arrays.y, y)
    classes, labels = np.unique(y, return_inverse=True)
    if len(classes) > _MOST_CLASSES or (y.dtype.kind == "f" and (classes != np.round(classes)).any()):
        raise ValueError(
            f"y has {len(classes)} different values, such as {classes[0].item()!r}; expected labels of classes, or "
            "data.task: regression for numbers"
        )
    if (count := arrays.num_classes) is not None:  # some of which no sample may be of
        if count > _MOST_CLASSES:
            raise ValueError(f"it has {count} classes; allowed are at most {_MOST_CLASSES}")
        classes, labels = np.arange(count), y
    about = (name, x, labels.astype(np.int64), test, len(classes), writers)
    return replace(
        assemble(*about, official_validation=arrays.validation),
        class_names=_names(classes, arrays.class_names),
        written_labels=_texts(classes.astype(np.int64) if classes.dtype.kind in "biuf" else classes),
    )


def _is_one_hot(y: np.ndarray) -> bool:
    """Whether labels [n, ...] are rows of one 1 and otherwise 0."""
    if y.ndim != 2 or y.dtype.kind not in "biuf":
        return False
    return bool(np.isin(y, (0, 1)).all() and (y.sum(1) == 1).all())


def _check_distinct(written: np.ndarray, y: np.ndarray) -> None:
    """Raise `ValueError` where labels [n] that are written differently are one number in y [n], as 7 and 07."""
    names, places = np.unique(written, return_index=True)
    numbers, counts = np.unique(y[places], return_counts=True)
    if len(numbers) < len(names):
        same = _texts(names[y[places] == numbers[counts.argmax()]])
        raise ValueError(
            f"y has the labels {' and '.join(map(repr, same[:2]))}, which are one number; write them alike if they are "
            "one class, or with a letter before each label if they are two"
        )


def _clients(written: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The clients [N] in their order, by number where all are numbers, and whose each sample [n] is."""
    names, numbers = np.unique(written, return_inverse=True)
    values = as_numbers(names)
    if values is names or len(np.unique(values)) < len(names):  # as 7 and 007, or texts too long for a float
        return names, numbers
    order = np.argsort(values, kind="stable")
    return names[order], np.argsort(order)[numbers]


def _client_names(clients: np.ndarray) -> tuple[str, ...]:
    """What clients [N] are called: 3 and not 3.0 if all are whole, as pandas writes them after a missing value."""
    names, values = _texts(clients), as_numbers(clients)
    without_point = tuple(name.removesuffix(".0") for name in names)
    whole = values.dtype.kind == "f" and (values == np.round(values)).all()
    return without_point if whole and len({*without_point}) == len(names) else names


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
    elif x.ndim == 3 and x.dtype != np.uint8:
        x = np.ascontiguousarray(x.transpose(0, 2, 1)) if layout == "nhwc" else x
    elif layout is not None:
        raise ValueError(
            f"data.layout = {layout!r} is of arrays [n, ., ., .], or numbers [n, ., .], and x is {x.dtype} "
            f"{list(x.shape)}; leave it out"
        )
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
    columns = original.reshape(len(original), -1) if original.size else np.empty((1, 0))
    if original.dtype.itemsize > 2 and original.dtype != np.float32 and (lost := indistinct(columns)) is not None:
        least, most = columns[:, lost].min(), columns[:, lost].max()
        raise ValueError(
            f"value {lost} of the samples is from {least} to {most}, which float32 hardly tells apart; subtract its "
            "mean, or leave it out"
        )
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


def _named(there: list[str], read: Callable[[tuple[str, ...]], dict[str, np.ndarray]]) -> OwnArrays:
    """What the arrays of a file hold: x and y of all samples, or of those for training, validation and testing.

    Args:
        there: what the arrays in it are called; which of them are not read is logged.
        read: those with the given names that are there.
    """
    sides = next((names for names in _BY_SIDE if names["train"][0] in there), None)
    if sides is not None:
        of_training = sides["train"][0]
        others = [names["train"][0] for names in _BY_SIDE if names is not sides]
        for name in (*others, "x", "test", "validation"):
            if name in there:
                raise ValueError(f"it has {of_training!r} and {name!r}; leave one of them out")
    of_samples = ("x", "y", *_OPTIONAL) if sides is None else (*chain(*sides.values()), "client", "class_names")
    arrays = read(of_samples)
    if unread := sorted({*there} - {*of_samples}):
        logger.warning("not read: %s (known: %s)", join_truncated(unread), ", ".join(of_samples))
    if sides is not None:
        arrays |= _of_all_sides(arrays, sides)
    client, test, validation, class_names = map(arrays.get, _OPTIONAL)
    return OwnArrays(_array(arrays, "x"), _array(arrays, "y"), client, test, validation, class_names)


def _of_all_sides(arrays: dict[str, np.ndarray], names: dict[str, tuple[str, str]]) -> dict[str, np.ndarray]:
    """x, y, test and validation of the samples of all sides, of which each has the arrays with these names."""
    sides = [side for side, pair in names.items() if not {*pair}.isdisjoint(arrays)]
    pairs = [names[side] for side in sides]
    x, y, part = joined([(of_x, _array(arrays, of_x), _array(arrays, of_y)) for of_x, of_y in pairs])
    side_of = np.array(sides)[part]
    return {"x": x, "y": y, "test": side_of == "test", "validation": side_of == "val"}


def _array(arrays: dict[str, np.ndarray], name: str) -> np.ndarray:
    if name not in arrays:
        raise ValueError(f"no array {name!r} in it")
    return arrays[name]


def _folder(path: Path) -> OwnArrays:
    if is_split_by_client(path):
        return read_folder(path)
    return read_leaf(path) if is_leaf(path) else read_pictures(path)
