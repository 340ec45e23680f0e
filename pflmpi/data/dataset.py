"""A dataset as the rest of the package sees it: arrays on the host, and a digest of their content."""

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from pflmpi.data.numbers import to_integers, to_numbers
from pflmpi.data.task_kinds import CLASSIFICATION, TaskKind
from pflmpi.errors import DataError

_ENOUGH = 10_000  # samples from which the scale of the values is estimated


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples with labels; official training and test samples together, distinguished by `official_test`.

    `digest` covers the arrays and the number of classes, not the name: two folders with the same content agree.
    """

    name: str
    images: np.ndarray  # uint8 [n, C, H, W], or float32 [n, ...]; may be a read-only memory map
    labels: np.ndarray  # int64 [n]; of other tasks than classification [n, ...], see `data.task_kinds`
    official_test: np.ndarray  # bool [n]
    writers: np.ndarray | None  # int64 [n], who wrote each sample; None if unknown
    num_classes: int  # in other tasks, the number of outputs for a sample or position
    mean: tuple[float, ...]  # per channel; of bytes, for values scaled to 0..1
    std: tuple[float, ...]
    digest: str  # SHA-256, hex
    class_names: tuple[str, ...] = ()  # [K], of the classes or outputs; empty if unknown
    written_labels: tuple[str, ...] = ()  # [K], the labels as they stand in the user's own file; empty for other data
    written_clients: tuple[str, ...] = ()  # by number in `writers`, as they stand in the user's own file
    may_be_tokens: bool = False  # whether the values were an array of integers, or rows of whole numbers
    columns: tuple[str, ...] = ()  # [D], names of the columns of a table; empty if unknown
    label_columns: tuple[str, ...] = ()  # names of the columns of a table that hold the labels
    characters: str = ""  # of texts, those that `images` numbers from 1; empty for other data
    official_validation: np.ndarray | None = None  # bool [n], of training samples; None if none are marked
    task_kind: TaskKind = CLASSIFICATION

    @property
    def strata(self) -> np.ndarray:
        """int64 [n], the class of each sample, by which test samples are stratified; 0 where labels are no classes."""
        return self.labels if self.task_kind.classes else np.zeros(len(self.labels), np.int64)

    @property
    def num_strata(self) -> int:
        """K, or 1 where labels are no classes."""
        return self.num_classes if self.task_kind.classes else 1

    @property
    def own_class_names(self) -> tuple[str, ...]:
        """[K], the names of the classes in the user's own data, or else its labels; () for a dataset of the package."""
        return self.class_names or self.written_labels

    @property
    def label_numbers(self) -> tuple[str, ...]:
        """[K], the labels as they stand in the user's own file if they are numbers, or else 0 to K - 1."""
        if self.written_labels and to_numbers(np.array(self.written_labels)).dtype.kind == "f":
            return self.written_labels
        return tuple(map(str, range(self.num_strata)))


def assemble(
    name: str,
    images: np.ndarray,
    labels: np.ndarray,
    official_test: np.ndarray,
    num_classes: int,
    writers: np.ndarray | None = None,
    digest: str | None = None,
    official_validation: np.ndarray | None = None,
    task_kind: TaskKind = CLASSIFICATION,
    may_be_tokens: bool | None = None,
) -> Dataset:
    """Makes a dataset of the given arrays, after checking that they match.

    Mean and standard deviation are 0.5 for every channel of bytes, as in the published personalised runs; float32
    values are taken as they are, with 0 and 1.

    Args:
        name: for messages.
        images: uint8 [n, C, H, W], or float32 [n, ...].
        labels: integers [n] in 0..num_classes-1; for another kind of task see `TaskKind.labels`.
        official_test: bool [n].
        num_classes: K.
        writers: integers [n] from 0, or None.
        digest: if already known; None computes it.
        official_validation: bool [n], which training samples are for validation; None if none are marked.
        task_kind: what the labels are.
        may_be_tokens: whether the values may number words or characters; None looks whether they are rows of whole
            numbers.

    Raises:
        DataError: arrays of different lengths, masked or without samples, samples that are not finite, or labels, marks
            or writers out of range or that are not whole numbers.
    """
    _check_unmasked(name, images, labels, official_test, writers, official_validation)
    try:
        labels = to_integers("labels", labels) if task_kind.classes else task_kind.labels(np.asarray(labels))
        official_test = to_integers("official_test", official_test)
        writers = None if writers is None else to_integers("writers", writers)
        if official_validation is not None:
            official_validation = to_integers("official_validation", official_validation)
    except ValueError as error:
        raise DataError(f"dataset {name!r}: {error}; its files are damaged") from error
    images = np.ascontiguousarray(images)  # torch takes no view that is mirrored
    marks = {"official_test": official_test, "official_validation": official_validation}
    _check_images(name, images, {"labels": labels, "writers": writers, **marks})
    if digest is None and images.dtype == np.float32:
        _check_finite(name, images)
    if task_kind.classes:
        _check_range(name, "labels", labels, num_classes - 1)
    for what, values in marks.items():
        _check_range(name, what, values, 1)
    _check_range(name, "writers", writers)
    official_test = official_test.astype(bool)
    official_validation = None if official_validation is None else official_validation.astype(bool)
    if may_be_tokens is None:
        may_be_tokens = images.dtype == np.float32 and images.ndim == 2 and _are_whole(images)
    mean, std = (0.5, 0.5) if images.dtype == np.uint8 else (0.0, 1.0)
    return Dataset(
        name=name,
        images=images,
        labels=labels,
        official_test=official_test,
        writers=writers,
        num_classes=num_classes,
        mean=(mean,) * images.shape[1],
        std=(std,) * images.shape[1],
        digest=digest or compute_digest(images, labels, official_test, writers, num_classes, official_validation),
        may_be_tokens=may_be_tokens,
        official_validation=official_validation,
        task_kind=task_kind,
    )


def _check_images(name: str, images: np.ndarray, by_sample: dict[str, np.ndarray | None]) -> None:
    """Raises `DataError` unless the images have an expected shape, and other arrays as many samples."""
    for what, array in by_sample.items():
        if array is not None and len(array) != len(images):
            raise DataError(
                f"dataset {name!r} has {len(images)} images but {len(array)} {what}; its files do not belong together"
            )
    if images.dtype not in (np.uint8, np.float32) or images.ndim < (4 if images.dtype == np.uint8 else 2):
        raise DataError(
            f"dataset {name!r} has samples {images.dtype} {list(images.shape)}; expected uint8 [n, C, H, W] or float32 "
            "[n, ...]"
        )
    if images.size == 0:
        raise DataError(f"dataset {name!r} has no samples, or samples without pixels; its files are empty")


def _check_unmasked(name: str, *arrays: object) -> None:
    """Raises `DataError` for a NumPy array with masked values, whose mask a conversion would drop."""
    if any(map(np.ma.is_masked, arrays)):
        raise DataError(
            f"dataset {name!r} has a masked array with masked values; fill them in (array.filled(...)), or leave those "
            "samples out"
        )


def _check_finite(name: str, images: np.ndarray) -> None:
    """Raises `DataError` for a sample with a value that is not finite."""
    for start in range(0, len(images), _ENOUGH):
        finite = np.isfinite(images[start : start + _ENOUGH])
        if not finite.all():
            raise DataError(
                f"dataset {name!r}: sample {start + np.argwhere(~finite)[0][0]} has a value that is not a finite "
                "number; fill it in, or leave the sample out"
            )


def _are_whole(images: np.ndarray) -> bool:
    """Whether all values of samples [n, D] are whole numbers; stops at the first that are not."""
    chunks = (images[start : start + _ENOUGH] for start in range(0, len(images), _ENOUGH))
    return all(bool((chunk == np.rint(chunk)).all()) for chunk in chunks)


def _check_range(name: str, what: str, values: np.ndarray | None, most: int | None = None) -> None:
    """Raises `DataError` unless whole numbers [n] are from 0 to `most`."""
    if values is not None and (values.min() < 0 or (most is not None and values.max() > most)):
        raise DataError(
            f"dataset {name!r} has {what} {values.min()}..{values.max()}, allowed are "
            f"{'whole numbers from 0' if most is None else f'0..{most}'}; its files are damaged"
        )


def standardise(dataset: Dataset, samples: np.ndarray | None = None) -> Dataset:
    """Returns the dataset with its own mean and standard deviation per channel or column (1 for constant ones).

    Args:
        samples: ascending indices of the samples to compute them from; None for all.
    """
    images = dataset.images if samples is None else dataset.images[samples]
    axes = tuple(axis for axis in range(images.ndim) if axis != 1)
    scale = 255.0 if images.dtype == np.uint8 else 1.0
    mean, std = images.mean(axes, dtype=np.float64) / scale, images.std(axes, dtype=np.float64) / scale
    std[std == 0] = 1
    return replace(dataset, mean=tuple(mean.tolist()), std=tuple(std.tolist()))


def standardise_by_pixel(dataset: Dataset) -> Dataset:
    """Returns the dataset as float32: of each pixel its mean is subtracted, then divided by its deviation + 0.001.

    As the authors of Ditto prepare MNIST; values are from 0 to 255 before. Each rank then has the samples in memory of
    its own, four bytes a value.
    """
    mean = dataset.images.mean(0, dtype=np.float64)
    chunks = np.array_split(dataset.images, 1 + len(dataset.images) // 1000)  # all as float64 would fill the memory
    std = np.sqrt(sum(np.square(chunk - mean).sum(0) for chunk in chunks) / len(dataset.images))
    images = dataset.images - mean.astype(np.float32)
    images /= (std + 0.001).astype(np.float32)
    channels = dataset.images.shape[1]
    return replace(dataset, images=images, mean=(0.0,) * channels, std=(1.0,) * channels)


def describe_unscaled(dataset: Dataset) -> str:
    """Describes the columns or channels of numbers far from mean 0 and deviation 1; "" if there are none."""
    images = dataset.images
    if images.dtype == np.uint8:
        return ""
    estimate = standardise(dataset, np.arange(0, len(images), max(1, len(images) // _ENOUGH)))
    mean, std = np.array(estimate.mean), np.array(estimate.std)
    far = np.flatnonzero((np.hypot(mean, std) > 10) | (std < 1e-3)).tolist()
    if not far:
        return ""
    what = "columns" if images.ndim == 2 else "channels"
    first = dataset.columns[far[0]] if dataset.columns else f"number {far[0]}"
    return (
        f"{len(far)} of {len(mean)} {what} are far from mean 0 and deviation 1, such as {first} (mean "
        f"{mean[far[0]]:.3g}, deviation {std[far[0]]:.3g}), and many models then train to chance: try data.normalize: "
        f"standard{', unless they are tokens' if dataset.may_be_tokens else ''}"
    )


def compute_digest(
    images: np.ndarray,
    labels: np.ndarray,
    official_test: np.ndarray,
    writers: np.ndarray | None,
    num_classes: int,
    official_validation: np.ndarray | None = None,
) -> str:
    """SHA-256 (hex) over dtype, shape and bytes of the arrays, and over the number of classes."""
    digest = hashlib.sha256(f"classes {num_classes}\n".encode())
    arrays = {"images": images, "labels": labels, "official_test": official_test, "writers": writers}
    for name, array in {**arrays, "official_validation": official_validation}.items():
        if array is not None:
            digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
