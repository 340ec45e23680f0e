"""Reads the user's own data: .npz or .h5 files, tables, folders of images, and formats of other packages."""

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from pflmpi.data.array_files import OwnArrays, concatenate_parts, read_h5, read_h5_names, read_npz, read_npz_names
from pflmpi.data.csv_table import read_table
from pflmpi.data.dataset import Dataset, assemble
from pflmpi.data.hugging_face import is_hugging_face, read_hugging_face
from pflmpi.data.image_files import find_image_classes, read_image_folder
from pflmpi.data.leaf import is_leaf, read_leaf
from pflmpi.data.numbers import find_missing, to_float32, to_numbers
from pflmpi.data.pfllib import is_split_by_client, read_pfllib
from pflmpi.data.task_kinds import CLASSIFICATION, TaskKind
from pflmpi.errors import DataError
from pflmpi.text import UNSTORABLE, join_truncated

logger = logging.getLogger(__name__)

_HOW = (
    "give an .npz or .h5 with x and y (and client, test, validation, class_names), a .csv with a header and a column "
    "of labels, a folder with a folder of pictures for each class, or one as PFLlib, LEAF or datasets writes it"
)
_MOST_CLASSES = 10_000
_OPTIONAL = ("client", "test", "validation", "class_names")  # arrays of a file
_SPLITS = ("train", "val", "test")
_SPLIT_ARRAYS = [  # names of x and y of each split, in files of MedMNIST and Keras
    {split: (f"{split}_images", f"{split}_labels") for split in _SPLITS},
    {split: (f"x_{split}", f"y_{split}") for split in _SPLITS},
]


def read_own(
    path: Path,
    label: str | list[str] | None = None,
    client: str | None = None,
    layout: str | None = None,
    task_kind: TaskKind = CLASSIFICATION,
) -> Dataset:
    """Reads the dataset in a file or folder.

    Samples of bytes are images: [n, H, W], [n, C, H, W], or [n, H, W, C] with 1 or 3 channels. All others become
    float32 of the same shape, with channels first if a layout is given. Classes and clients are numbered in sorted
    order: by number if all are numbers, also as text.

    Args:
        label, client: columns of a table; None: the columns of the default names, and as the label the last other one.
        task_kind: what the labels are.
        layout: `nchw` or `nhwc`, whether arrays [n, ., ., .] or numbers [n, ., .] have their channels first or last;
            None if the shape is clear, or for sequences that stay as they are.

    Raises:
        DataError: there is no such file, or its content cannot be used.
    """
    if not path.exists():
        raise DataError(f"data.path = {str(path)!r} does not exist; {_HOW}")
    for key, column in (("label", label), ("client", client)):
        if column is not None and not is_table(path):
            raise DataError(f"data.{key} = {column!r} names a column of a table, and this is {path.name}; leave it out")
    if layout is not None and not may_hold_arrays(path):
        raise DataError(f"data.layout = {layout!r} is of arrays, and {path.name} holds none; leave it out")
    try:
        _check_one_format(path)
        if is_hugging_face(path):
            arrays = read_hugging_face(path, label, client)
        elif path.is_dir():
            arrays = _read_folder(path)
        elif path.suffix == ".npz":
            arrays = _read_named_arrays(read_npz_names(path), lambda names: read_npz(path, (), names))
        elif path.suffix in (".h5", ".hdf5"):
            arrays = _read_named_arrays(read_h5_names(path), lambda names: read_h5(path, names))
        elif path.suffix == ".csv":
            arrays = read_table(path, label, client)
        else:
            raise DataError(f"data.path = {str(path)!r} has an unknown suffix; {_HOW}")
        return _make_dataset(path.stem, replace(arrays, layout=arrays.layout or layout), task_kind)
    except (OSError, ValueError) as error:
        raise DataError(f"data.path = {str(path)!r} cannot be used: {error}") from error
    except MemoryError as error:
        raise DataError(
            f"data.path = {str(path)!r} needs more memory than this process may have; allow it more (ulimit -v, --mem "
            "of a job), or use fewer samples"
        ) from error


def is_table(path: Path) -> bool:
    """Whether a file or folder has columns, to which `data.label` and `data.client` apply."""
    return path.suffix == ".csv" or is_hugging_face(path)


def may_hold_arrays(path: Path) -> bool:
    """Whether a file or folder may hold arrays, to which `data.layout` applies; tables and image files do not."""
    if path.is_dir():
        return is_split_by_client(path) or is_leaf(path) or is_hugging_face(path)
    return path.suffix != ".csv"


def _check_one_format(path: Path) -> None:
    """Raises `ValueError` for a folder of pictures in which files of another format would take their place."""
    if path.is_dir() and may_hold_arrays(path) and len(classes := find_image_classes(path)) > 1:
        entries = (entry for pattern in ("*", "*/*") for entry in path.glob(pattern))
        files = [str(file.relative_to(path)) for file in entries if file.suffix in (".json", ".npz", ".parquet")]
        raise ValueError(
            f"it has pictures in folders of classes ({join_truncated(classes)}), and files of another format "
            f"({join_truncated(sorted(files))}); move one of both elsewhere"
        )


def has_unclear_channels(images: np.ndarray, layout: str | None) -> bool:
    """Whether data are sequences for which neither the shape nor the user says where the channels are."""
    return images.ndim == 3 and layout is None


def _make_dataset(name: str, arrays: OwnArrays, task_kind: TaskKind) -> Dataset:
    """Checks and converts the arrays of a file, and makes them a dataset."""
    if task_kind.classes and arrays.y.ndim == 2 and arrays.y.shape[1] == 1:
        arrays = replace(arrays, y=arrays.y[:, 0])
    x = _convert_samples(arrays.x, arrays.layout)
    _check_shapes(arrays, one_label=task_kind.classes)
    test = np.zeros(len(x), bool) if arrays.test is None else arrays.test
    validation = _check_marks(test, arrays.validation)
    y = to_numbers(arrays.y)
    for what, values in (("label", y if task_kind.classes else None), ("client", arrays.client)):
        if values is not None and (missing := find_missing(values, allow_blank=what == "label")) is not None:
            raise ValueError(
                f"sample {missing} has no {what} ({values[missing]}); give each sample one, or leave it out"
            )
    clients, _, writers = ((), None, None) if arrays.client is None else _number(arrays.client)
    class_names: tuple[str, ...] = ()
    written_labels: tuple[str, ...] = ()
    if task_kind.classes:
        written_labels, classes, labels = _find_classes(arrays, y)
        num_classes = len(classes)
        class_names = _find_class_names(classes, arrays.class_names)
    else:
        labels = task_kind.labels(y)
        num_classes = task_kind.num_outputs(labels)
        class_names = _find_output_names(num_classes, labels, arrays)
    _check_class_names(class_names)
    dataset = assemble(
        name,
        x,
        labels,
        test.astype(bool),
        num_classes,
        writers,
        official_validation=validation,
        task_kind=task_kind,
        # A table has no type of its own; floats of an array are meant as such, as pixels from 0 to 255 are.
        may_be_tokens=None if arrays.columns else arrays.x.dtype.kind in "iu" and x.dtype != np.uint8,
    )
    return replace(
        dataset,
        class_names=class_names,
        written_labels=written_labels,
        written_clients=clients,
        columns=arrays.columns,
        label_columns=arrays.label_columns,
        characters=arrays.characters,
    )


def _check_shapes(arrays: OwnArrays, one_label: bool) -> None:
    """Raises `ValueError` unless all arrays have as many samples as x, and labels one axis if there is one a sample."""
    count = len(arrays.x)
    by_name = {"y": arrays.y, "client": arrays.client, "test": arrays.test, "validation": arrays.validation}
    for name, array in by_name.items():
        if array is None:
            continue
        any_axes = name == "y" and not one_label  # which the kind of task checks
        if array.shape[:1] != (count,) or not (any_axes or array.ndim == 1):
            one_hot = "one-hot? save y.argmax(1); " if name == "y" and _is_one_hot(array) else ""
            several = f" ({one_hot}several labels: data.task; pflmpi data: --task)" if name == "y" else ""
            raise ValueError(
                f"{name} has the shape {list(array.shape)}, and x has {count} samples; expected [{count}]{several}"
            )
    if not count:
        raise ValueError("it has no samples")


def _find_classes(arrays: OwnArrays, y: np.ndarray) -> tuple[tuple[str, ...], np.ndarray, np.ndarray]:
    """Returns the classes [K] among labels y [n] of any type, as `_number`, and the class of each sample [n]."""
    names, classes, labels = _number(arrays.y)
    if classes.dtype.kind != y.dtype.kind:
        numbers, counts = np.unique(values := to_numbers(classes), return_counts=True)
        same = _to_texts(classes[values == numbers[counts.argmax()]])
        raise ValueError(
            f"y has the labels {' and '.join(map(repr, same[:2]))}, which are one number; write them alike if they are "
            "one class, or with a letter before each label if they are two"
        )
    if len(classes) > _MOST_CLASSES or (y.dtype.kind == "f" and (classes != np.round(classes)).any()):
        raise ValueError(
            f"y has {len(classes)} different values, such as {classes[0].item()!r}; expected labels of classes, or "
            "data.task: regression for numbers"
        )
    if arrays.num_classes is not None:
        if arrays.num_classes > _MOST_CLASSES:
            raise ValueError(f"it has {arrays.num_classes} classes; allowed are at most {_MOST_CLASSES}")
        classes, labels = np.arange(arrays.num_classes), y  # some classes may have no sample
    if classes.dtype.kind in "biuf" and np.abs(classes).max() < 2**53:
        names = tuple(map(str, map(int, classes)))  # 7, also where it is written 07 or 7.0
    return names, classes, labels.astype(np.int64)


def _is_one_hot(y: np.ndarray) -> bool:
    """Whether labels [n, ...] are rows of one 1 and otherwise 0."""
    if y.ndim != 2 or y.dtype.kind not in "biuf":
        return False
    return bool(np.isin(y, (0, 1)).all() and (y.sum(1) == 1).all())


def _number(written: np.ndarray) -> tuple[tuple[str, ...], np.ndarray, np.ndarray]:
    """Returns the distinct labels or clients [K], sorted, as text and as values, and which of them each sample [n] has.

    They are numbers if all are and no two are one, as 7 and 007 are; whole ones are 3 as text, not 3.0, to which pandas
    turns them after a missing value.
    """
    values, index = np.unique(written, return_inverse=True)
    texts, numbers = _to_texts(values), to_numbers(values)
    if numbers.dtype.kind != "f" or len(np.unique(numbers)) < len(texts):
        return texts, values, index
    order = np.argsort(numbers, kind="stable")
    point = ".0" if (numbers == np.round(numbers)).all() else ""
    return tuple(texts[place].removesuffix(point) for place in order), numbers[order], np.argsort(order)[index]


def _check_marks(test: np.ndarray, validation: np.ndarray | None) -> np.ndarray | None:
    """Returns which samples [n] are for validation, None if none is; `ValueError` for unclear or conflicting marks."""
    for name, marks in {"test": test, "validation": validation}.items():
        if marks is not None and (invalid := ~np.isin(marks, (0, 1))).any():
            sample = int(invalid.argmax())
            raise ValueError(f"sample {sample} has {name} = {marks[sample]}; allowed: 0, 1, true, false")
    if validation is None or not validation.any():
        return None
    if (both := test.astype(bool) & validation.astype(bool)).any():
        raise ValueError(f"sample {int(both.argmax())} is marked as test and as validation; choose one")
    return validation.astype(bool)


def _find_class_names(classes: np.ndarray, names: np.ndarray | None) -> tuple[str, ...]:
    """Returns the names of the classes [K], if `class_names` of the file, or labels that are text, give them.

    A label of spaces alone is quoted, so that it can be seen.
    """
    if names is None and classes.dtype.kind in "biuf":
        return ()
    if names is None:
        return tuple(repr(name) if name.isspace() else name for name in _to_texts(classes))
    if names.ndim == 1 and len(names) == len(classes):
        return _to_texts(names)
    if names.ndim == 1 and classes.dtype.kind in "iuf" and classes.min() >= 0 and classes.max() < len(names):
        return _to_texts(names[classes.astype(np.int64)])
    raise ValueError(
        f"class_names has the shape {list(names.shape)}, and y has {len(classes)} classes, up to {classes[-1]}; "
        "give one name for each class, in the order of the labels"
    )


def _find_output_names(num_outputs: int, labels: np.ndarray, arrays: OwnArrays) -> tuple[str, ...]:
    """Returns the names of the outputs [K] for labels [n, ...], if `class_names` of the file gives them.

    Those of tokens may go on, with classes that no position has.
    """
    names = arrays.class_names
    if names is None or arrays.num_classes is not None:  # of the values of a column of Hugging Face
        return ()
    if names.ndim != 1 or len(names) < num_outputs or (len(names) > num_outputs and labels.dtype.kind == "f"):
        if num_outputs == 1:
            logger.warning("not used: class_names of shape %s, which call the values of one output", list(names.shape))
            return ()
        raise ValueError(
            f"class_names has the shape {list(names.shape)}, and y has {num_outputs} outputs; give one name for each, "
            "in their order, or leave it out"
        )
    return _to_texts(names[:num_outputs])


def _check_class_names(names: tuple[str, ...]) -> None:
    """Raises `ValueError` for names of classes [K] that are empty or repeated, or that no checkpoint can store."""
    labels: dict[str, int] = {}
    for label, name in enumerate(names):
        if not name.strip():
            raise ValueError(f"class {label} has the empty name {name!r}; give each class a name")
        if (first := labels.setdefault(name, label)) < label:
            raise ValueError(
                f"classes {first} and {label} have the same name {name!r}; give each its own, or both one label"
            )
        if UNSTORABLE.search(name):
            raise ValueError(f"class {label} has the name {name!r}, with a character that no text can hold; rename it")


def _to_texts(values: np.ndarray) -> tuple[str, ...]:
    return tuple(value.decode() if isinstance(value, bytes) else str(value) for value in values.tolist())


def _convert_samples(x: np.ndarray, layout: str | None) -> np.ndarray:
    """Converts samples to uint8 [n, C, H, W] or float32 [n, ...], with channels first.

    Raises:
        ValueError: they are no numbers, have an unclear layout, or float32 cannot hold or tell apart their values.
    """
    if x.ndim < 2 or x.dtype.kind not in "biuf":
        raise ValueError(f"x is {x.dtype} {list(x.shape)}; expected numbers [n, ...]")
    if x.ndim == 4:
        x = x if (layout or _guess_layout(x)) == "nchw" else np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    elif x.ndim == 3 and x.dtype != np.uint8:
        x = np.ascontiguousarray(x.transpose(0, 2, 1)) if layout == "nhwc" else x
    elif layout is not None:
        raise ValueError(
            f"data.layout = {layout!r} is of arrays [n, ., ., .], or numbers [n, ., .], and x is {x.dtype} "
            f"{list(x.shape)}; leave it out"
        )
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        return x[:, None] if x.ndim == 3 else x
    return to_float32(x)


def _guess_layout(x: np.ndarray) -> str:
    """Returns `nchw`, or `nhwc` for bytes with 1 or 3 channels last, if the shape [n, ., ., .] is clear.

    Raises:
        ValueError: it looks different: height and width are often equal, and channels few.
    """
    _, first, middle, last = x.shape
    if (first == middle) != (middle == last):
        likely = "nhwc" if first == middle else "nchw"
    elif first == middle:  # all equal
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


def _read_named_arrays(names: list[str], read: Callable[[tuple[str, ...]], dict[str, np.ndarray]]) -> OwnArrays:
    """Reads the arrays of a file: x and y of all samples, or of each split; logs which arrays are not read.

    Args:
        names: of the arrays in the file.
        read: reads those of the given names that the file has.
    """
    split_arrays = next((pairs for pairs in _SPLIT_ARRAYS if pairs["train"][0] in names), None)
    if split_arrays is None:
        known: tuple[str, ...] = ("x", "y", *_OPTIONAL)
    else:
        train_x = split_arrays["train"][0]
        other_layouts = [pairs["train"][0] for pairs in _SPLIT_ARRAYS if pairs is not split_arrays]
        for name in (*other_layouts, "x", "test", "validation"):
            if name in names:
                raise ValueError(f"it has {train_x!r} and {name!r}; leave one of them out")
        known = (*chain(*split_arrays.values()), "client", "class_names")
    arrays = read(known)
    if unread := sorted({*names} - {*known}):
        logger.warning("not read: %s (known: %s)", join_truncated(unread), ", ".join(known))
    if split_arrays is not None:
        arrays |= _concatenate_splits(arrays, split_arrays)
    client, test, validation, class_names = map(arrays.get, _OPTIONAL)
    return OwnArrays(_require_array(arrays, "x"), _require_array(arrays, "y"), client, test, validation, class_names)


def _concatenate_splits(arrays: dict[str, np.ndarray], names: dict[str, tuple[str, str]]) -> dict[str, np.ndarray]:
    """Returns x, y, test and validation of the samples of all splits; `names` are those of x and y of each."""
    splits = [split for split, pair in names.items() if not {*pair}.isdisjoint(arrays)]
    parts = [(x, _require_array(arrays, x), _require_array(arrays, y)) for x, y in (names[split] for split in splits)]
    x, y, part_numbers = concatenate_parts(parts)
    split_of_sample = np.array(splits)[part_numbers]
    return {"x": x, "y": y, "test": split_of_sample == "test", "validation": split_of_sample == "val"}


def _require_array(arrays: dict[str, np.ndarray], name: str) -> np.ndarray:
    if name not in arrays:
        raise ValueError(f"no array {name!r} in it")
    return arrays[name]


def _read_folder(path: Path) -> OwnArrays:
    if is_split_by_client(path):
        return read_pfllib(path)
    return read_leaf(path) if is_leaf(path) else read_image_folder(path)
