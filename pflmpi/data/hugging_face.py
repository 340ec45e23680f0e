"""Reads Hugging Face datasets on this machine: as `save_to_disk` writes them, or parquet files as on the hub."""

import json
import logging
import re
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from pflmpi.data.array_files import OwnArrays, check_memory
from pflmpi.data.csv_table import MARKS, find_label_and_client, find_mark_columns
from pflmpi.data.image_files import read_images
from pflmpi.text import first_line, join_truncated

logger = logging.getLogger(__name__)

_SPLIT = re.compile(r"(?<![a-z])(?:(train)|(validation|valid|val|dev)|(test))(?![a-z])")
_NAMES = ("train", "validation", "test")  # of the splits, in the order of the groups above
_LIST = re.compile("(large_|fixed_size_)?list<")  # a type of pyarrow
_UNLIKE = "column {!r} has lists of unlike length; pad or cut them"
_SHARD = re.compile(r"(.*?)(\d{5})-of-(\d{5})")  # the name of one of several files
_FOLDERS = ("", "data", "train", "validation", "test")  # where parquet files may be


def is_hugging_face(path: Path) -> bool:
    """Whether a path is such a dataset."""
    return path.suffix == ".parquet" or (path.is_dir() and bool(_find_saved(path) or _find_parquet(path)))


def read_hugging_face(path: Path, label: str | list[str] | None, client: str | None) -> OwnArrays:
    """Reads a folder or .parquet file; `label` and `client` name columns, None for those of the default names.

    A sample is its image, or else its list of numbers, or else the numbers of all other columns.

    Raises:
        ValueError: a file is damaged, or its columns cannot be used.
    """
    try:
        arrow = import_module("pyarrow")
        files = _find_files(path)
        tables = [_read_file(arrow, file) for _, file in files]
        _check_columns([file for _, file in files], tables)
        splits = np.repeat([split for split, _ in files], [table.num_rows for table in tables])
        return _to_arrays(arrow.concat_tables(tables), splits, label, client)
    except ImportError as error:
        raise ValueError(
            f"it is read by pyarrow, which is not installed ({error}); `pip install 'pflmpi[analysis]'` brings it"
        ) from error
    except (KeyError, TypeError, NotImplementedError) as error:  # some of pyarrow's are these
        raise ValueError(first_line(error)) from error


def _find_saved(folder: Path) -> list[Path]:
    """Finds the folders that `save_to_disk` wrote."""
    return sorted(file.parent for file in (*folder.glob("state.json"), *folder.glob("*/state.json")))


def _find_arrow_files(folder: Path) -> list[Path]:
    """Returns the arrow files of a saved dataset; others, such as a cache of `datasets`, may lie beside them."""
    try:
        entries = json.loads((folder / "state.json").read_bytes())["_data_files"]
        return [folder / Path(entry["filename"]).name for entry in entries]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / 'state.json'} names no files of data ({first_line(error)})") from error


def _find_parquet(folder: Path) -> list[Path]:
    return sorted(file for name in _FOLDERS for file in (folder / name).glob("*.parquet"))


def _find_files(path: Path) -> list[tuple[str, Path]]:
    """Returns the split of each file ("" if its path names none) and its path."""
    if path.is_file():
        return [("", path)]
    files = []
    for entry in _find_saved(path) or _find_parquet(path):
        match = _SPLIT.search(entry.relative_to(path).as_posix().lower())
        split = _NAMES[match.lastindex - 1] if match and match.lastindex else ""
        files += [(split, file) for file in ([entry] if entry.is_file() else _find_arrow_files(entry))]
    if any(split for split, _ in files):
        for split, file in files:
            if not split:
                raise ValueError(f"{file} is of no split that is known (train, validation, test); move it elsewhere")
    _check_complete([file for _, file in files])
    return files


def _check_complete(files: list[Path]) -> None:
    """Raises `ValueError` unless files that are numbered, such as 00001-of-00002, are all there, and each once."""
    present = dict[tuple[str, int], set[int]]()
    names = dict[tuple[str, int], str]()
    for file in files:
        if shard := _SHARD.match(file.name):
            start, number, count = f"{file.parent}/{shard[1]}", int(shard[2]), int(shard[3])
            present.setdefault((start, count), set()).add(number)
            if (other := names.setdefault((start, number), file.name)) != file.name:
                raise ValueError(
                    f"{start}* has two files with the number {number}, {other} and {file.name}; move those of another "
                    "download elsewhere"
                )
    for (start, count), numbers in present.items():
        if missing := sorted({*range(count)} - numbers):
            raise ValueError(
                f"there are {len(numbers)} of {count} files {start}*, and not {missing[0]:05d}-of-{count:05d}; copy "
                "those that are missing too, or rename the others if they are all you want"
            )


def _read_file(arrow: Any, file: Path) -> Any:
    try:
        if file.suffix == ".parquet":
            metadata = import_module("pyarrow.parquet").read_metadata(file)
            sizes = (metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
            check_memory(max(metadata.num_rows, sum(sizes)))
            table = import_module("pyarrow.parquet").ParquetFile(file).read()
        else:
            table = import_module("pyarrow.ipc").open_stream(arrow.memory_map(str(file))).read_all()
        table.validate(full=True)
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{file}: {first_line(error)}") from error
    return table


def _check_columns(files: list[Path], tables: list[Any]) -> None:
    """Raises `ValueError` unless all files have the same columns, and the same class names of them."""
    known = dict[str, tuple[Path, np.ndarray]]()  # class names by column, and the file that has them
    for file, table in zip(files, tables, strict=True):
        if table.schema != tables[0].schema:
            columns, expected = (str(t.schema.remove_metadata()).splitlines() for t in (table, tables[0]))
            raise ValueError(
                f"{file} has columns {join_truncated(columns)}, and {files[0]} has {join_truncated(expected)}"
            )
        for name, classes in _find_class_names(table).items():
            first, expected_classes = known.setdefault(name, (file, classes))
            if not np.array_equal(classes, expected_classes):
                raise ValueError(
                    f"column {name!r} has the classes {join_truncated(classes.tolist())} in {file}, and "
                    f"{join_truncated(expected_classes.tolist())} in {first}; give all files the same, in one order "
                    "(datasets: align_labels_with_mapping)"
                )


def _to_arrays(table: Any, splits: np.ndarray, label: str | list[str] | None, client: str | None) -> OwnArrays:
    if not table.num_rows:
        raise ValueError("it has no samples")
    names = [name for name in table.column_names if not name.startswith("__index_level_")]  # row numbers of pandas
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"it has several columns {duplicates[0]!r}; give each a name of its own")
    class_names = _find_class_names(table)
    with_classes = [name for name in names if name in class_names]
    default_label = with_classes[0] if len(with_classes) == 1 else None
    labels, client = find_label_and_client(names, label, client, default_label)
    y = [_read_column(table, name) for name in labels]
    if splits.any():
        mark_names, marks = dict[str, str](), {name: splits == name for name in MARKS}
    else:
        mark_names = find_mark_columns(names, (*labels, client))
        marks = {name: _read_column(table, column) for name, column in mark_names.items()}
    others = [name for name in names if name not in (*labels, client, *mark_names.values())]
    x, sample_columns = _read_samples(table, others)
    if unused := sorted({*others} - {*sample_columns}):
        logger.warning("a sample is its %r; not used: %s", sample_columns[0], join_truncated(unused))
    label_classes = class_names.get(labels[0]) if len(labels) == 1 else None
    return OwnArrays(
        x=x,
        y=y[0] if len(labels) == 1 else np.stack(y, 1),
        client=None if client is None else _read_column(table, client),
        test=marks.get("test"),
        validation=marks.get("validation"),
        class_names=label_classes,
        num_classes=None if label_classes is None else len(label_classes),
        columns=tuple(sample_columns) if x.shape[1:] == (len(sample_columns),) else (),
        label_columns=tuple(labels),
        layout="nchw" if x.dtype == np.uint8 and x.ndim == 4 else None,  # images
    )


def _find_class_names(table: Any) -> dict[str, np.ndarray]:
    """Returns the class names of the columns for which the dataset's metadata has them."""
    metadata = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
    for key in ("info", "features"):
        metadata = metadata.get(key) if isinstance(metadata, dict) else None
    features = [(name, metadata.get(name)) for name in table.column_names] if isinstance(metadata, dict) else []
    names = {name: feature.get("names") for name, feature in features if isinstance(feature, dict)}
    return {name: np.array(classes, str) for name, classes in names.items() if isinstance(classes, list)}


def _read_samples(table: Any, names: list[str]) -> tuple[np.ndarray, list[str]]:
    """Reads the samples [n, ...]; returns them and the columns that they are made of."""
    types = {name: table.schema.field(name).type for name in names}
    images = [name for name, kind in types.items() if str(kind).startswith("struct<bytes: ")]
    lists = [name for name, kind in types.items() if _LIST.match(str(getattr(kind, "storage_type", kind)))]
    if not names:
        raise ValueError("it has no column of samples; do not leave some out (datasets: remove_columns)")
    if len(candidates := images or lists) > 1:
        raise ValueError(
            f"it has several columns of samples: {join_truncated(candidates)}; leave some out (datasets: "
            "remove_columns)"
        )
    if images:
        contents = [value for chunk in table.column(images[0]).chunks for value in chunk.field("bytes").to_pylist()]
        if None in contents:
            raise ValueError(f"sample {contents.index(None)} has no bytes in {images[0]!r}; embed the pictures")
        return read_images(
            (f"the picture of sample {n}", BytesIO(content)) for n, content in enumerate(contents)
        ), images
    columns = lists or names
    arrays = [_read_column(table, name) for name in columns]
    for name, array in zip(columns, arrays, strict=True):
        if array.dtype.kind not in "biuf":
            raise ValueError(f"column {name!r} is {types[name]}, no numbers; encode it (texts: lists of tokens)")
    return arrays[0] if lists else np.stack(arrays, 1), columns


def _read_column(table: Any, name: str) -> np.ndarray:
    """Reads a column [n, ...]; nested lists become axes."""
    column = table.column(name)
    if column.null_count:
        missing = column.is_null().index(True).as_py()
        raise ValueError(f"sample {missing} has no {name}; fill it in, or leave it out")
    chunks = [_chunk_to_numpy(name, chunk) for chunk in column.chunks if len(chunk)]
    if len({chunk.shape[1:] for chunk in chunks}) > 1:
        raise ValueError(_UNLIKE.format(name))
    return np.concatenate(chunks)


def _chunk_to_numpy(name: str, array: Any) -> np.ndarray:
    shape = [len(array)]
    array = getattr(array, "storage", array)  # of an array of `datasets`, where that is imported
    while _LIST.match(str(array.type)):
        lengths = set(import_module("pyarrow.compute").list_value_length(array).to_pylist())
        if len(lengths) != 1 or None in lengths:
            raise ValueError(_UNLIKE.format(name))
        shape.append(lengths.pop())
        array = array.flatten()
    values: np.ndarray = array.to_numpy(zero_copy_only=False)
    return (values.astype(str) if values.dtype == object else values).reshape(shape)
