"""Datasets of Hugging Face on this machine: as `save_to_disk` writes them, or parquet files as the hub has them."""

import json
import logging
import re
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pflmpi.data.array_files import check_memory
from pflmpi.data.csv_table import LABELS, MARKS
from pflmpi.text import first_line, some

logger = logging.getLogger(__name__)

_SPLIT = re.compile(r"(?<![a-z])(?:(train)|(validation|valid|val|dev)|(test))(?![a-z])")
_NAMES = ("train", "validation", "test")  # of the splits, in the order of the groups above
_FOLDERS = ("", "data", "train", "validation", "test")  # where parquet files may be


class Columns(NamedTuple):
    """Columns of all samples.

    Attributes:
        x: [n, ...], or the files of n pictures.
        y, client: [n, ...] and [n] of any kind.
        test, validation: [n] marks; None where nothing says so.
        class_names: of the labels 0, 1, ...; None where they have none.
        names: of the values of a sample, in a table.
    """

    x: np.ndarray | list[BytesIO]
    y: np.ndarray
    client: np.ndarray | None
    test: np.ndarray | None
    validation: np.ndarray | None
    class_names: np.ndarray | None
    names: tuple[str, ...]


def is_hugging_face(path: Path) -> bool:
    """Whether a path is of such a dataset."""
    return path.suffix == ".parquet" or (path.is_dir() and bool(_saved(path) or _parquet(path)))


def read_hugging_face(path: Path, label: str | list[str] | None, client: str | None) -> Columns:
    """The dataset in a folder or .parquet file; `label` and `client` are columns, None for those called so.

    A sample is its picture, or else its list of numbers, or else the numbers of all other columns.

    Raises:
        ValueError: a file is damaged, or columns are not as said.
    """
    try:
        arrow = import_module("pyarrow")
        files = _files(path)
        tables = [_table(arrow, file) for _, file in files]
        for table, (_, file) in zip(tables, files, strict=True):
            if table.schema != tables[0].schema:
                kinds, expected = (
                    [f"{field.name}: {field.type}" for field in each.schema] for each in (table, tables[0])
                )
                raise ValueError(f"{file} has columns {some(kinds)}, and {files[0][1]} has {some(expected)}")
        splits = np.repeat([split for split, _ in files], [table.num_rows for table in tables])
        return _columns(arrow.concat_tables(tables), splits, label, client)
    except ImportError as error:
        raise ValueError(
            f"it is read by pyarrow, which is not installed ({error}); `pip install 'pflmpi[analysis]'` brings it"
        ) from error
    except (KeyError, TypeError, NotImplementedError) as error:  # some of pyarrow's are these
        raise ValueError(first_line(error)) from error


def _saved(folder: Path) -> list[Path]:
    """The folders in which `save_to_disk` has described arrow files."""
    return sorted(file.parent for file in (*folder.glob("state.json"), *folder.glob("*/state.json")))


def _arrow(folder: Path) -> list[Path]:
    """The files that belong to a dataset; others, such as a cache of `datasets`, may lie beside them."""
    try:
        entries = json.loads((folder / "state.json").read_bytes())["_data_files"]
        return [folder / Path(entry["filename"]).name for entry in entries]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / 'state.json'} names no files of data ({first_line(error)})") from error


def _parquet(folder: Path) -> list[Path]:
    return sorted(file for name in _FOLDERS for file in (folder / name).glob("*.parquet"))


def _files(path: Path) -> list[tuple[str, Path]]:
    """The split, "" where none is said, and the path of each file, training first."""
    if path.is_file():
        return [("", path)]
    named = [(folder.relative_to(path).as_posix(), file) for folder in _saved(path) for file in _arrow(folder)]
    named = named or [(file.relative_to(path).as_posix(), file) for file in _parquet(path)]
    splits = [_split(name) for name, _ in named]
    if any(splits) and not all(splits):
        odd = named[splits.index("")][0]
        raise ValueError(f"{odd} is of no split that is known (train, validation, test); move it elsewhere")
    order = {split: place for place, split in enumerate(("", *_NAMES))}
    return sorted(zip(splits, (file for _, file in named), strict=True), key=lambda pair: (order[pair[0]], pair[1]))


def _split(name: str) -> str:
    match = _SPLIT.search(name.lower())
    return _NAMES[match.lastindex - 1] if match and match.lastindex else ""


def _table(arrow: Any, file: Path) -> Any:
    if not file.is_file():
        raise ValueError(f"{file} is no regular file")
    try:
        if file.suffix == ".parquet":
            about = import_module("pyarrow.parquet").read_metadata(file)
            groups = (about.row_group(number).total_byte_size for number in range(about.num_row_groups))
            check_memory(max(about.num_rows, sum(groups)))
            table = import_module("pyarrow.parquet").ParquetFile(file).read()
        else:
            table = import_module("pyarrow.ipc").open_stream(arrow.memory_map(str(file))).read_all()
        table.validate(full=True)
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{file}: {first_line(error)}") from error
    return table


def _columns(table: Any, splits: np.ndarray, label: str | list[str] | None, client: str | None) -> Columns:
    names = table.column_names
    wanted = label if isinstance(label, list) else [label or _label(table)]
    client = client or ("client" if "client" in names else None)
    for key, name in (*(("label", name) for name in wanted), ("client", client)):
        if name is not None and names.count(name) != 1:
            raise ValueError(f"there is no column data.{key} = {name!r}; known: {', '.join(names)}")
    marks = {name: _values(table, name) for name in MARKS if name in names and not splits.any()}
    others = [name for name in names if name not in (*wanted, client, *marks)]
    y = np.stack([_values(table, name) for name in wanted], 1) if len(wanted) > 1 else _values(table, wanted[0])
    classes = _class_names(table, wanted[0]) if len(wanted) == 1 else None
    if classes is not None and y.dtype.kind == "i" and (y < 0).any():
        raise ValueError(f"sample {(y < 0).argmax()} has the label {y.min()}, of no class; leave out a split without")
    if splits.any():
        marks = {name: splits == name for name in MARKS}
    x, used = _samples(table, others)
    if unused := [name for name in others if name not in used]:
        logger.warning("a sample is its %r; not used: %s", used[0], some(unused))
    columns = used if used == others and isinstance(x, np.ndarray) and x.ndim == 2 else []
    of_client = None if client is None else _values(table, client)
    return Columns(x, y, of_client, marks.get("test"), marks.get("validation"), classes, tuple(columns))


def _label(table: Any) -> str:
    """The column of the labels where nobody names one."""
    names = [name for name in LABELS if name in table.column_names]
    names = names or [name for name in table.column_names if _class_names(table, name) is not None]
    if len(names) != 1:
        known = ", ".join(table.column_names)
        raise ValueError(f"name the column of the labels by data.label (pflmpi data: --label); known: {known}")
    return str(names[0])


def _class_names(table: Any, name: str) -> np.ndarray | None:
    """What the classes of a column are called, where a dataset says so."""
    about = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
    for key in ("info", "features", name, "names"):
        about = about.get(key) if isinstance(about, dict) else None
    return np.array(about, str) if isinstance(about, list) else None


def _samples(table: Any, names: list[str]) -> tuple[np.ndarray | list[BytesIO], list[str]]:
    """The samples, and the columns that they are of."""
    kinds = {name: table.schema.field(name).type for name in names}
    pictures = [name for name, kind in kinds.items() if str(kind).startswith("struct<bytes: ")]
    lists = [name for name, kind in kinds.items() if _is_list(kind)]
    for several in (pictures, lists):
        if len(several) > 1:
            raise ValueError(f"a sample has {some(several)}; keep one of them (datasets: remove_columns)")
    if pictures:
        values = table.column(pictures[0]).combine_chunks().field("bytes").to_pylist()
        if None in values:
            raise ValueError(f"sample {values.index(None)} has no bytes in {pictures[0]!r}; embed the pictures")
        return [BytesIO(value) for value in values], pictures
    used = lists or names
    if not used:
        raise ValueError("there are no columns besides that of the labels")
    arrays = [_values(table, name) for name in used]
    for name, array in zip(used, arrays, strict=True):
        if array.dtype.kind not in "biuf":
            raise ValueError(f"column {name!r} is {kinds[name]}, no numbers; encode it (texts: lists of tokens)")
    return arrays[0] if lists else np.stack(arrays, 1), used


def _values(table: Any, name: str) -> np.ndarray:
    """A column [n, ...]; lists are axes."""
    column = table.column(name)
    if column.null_count:
        lost = column.is_null().index(True).as_py()
        raise ValueError(f"sample {lost} has no {name}; fill it in, or leave it out")
    parts = [_chunk(name, chunk) for chunk in column.chunks if len(chunk)]
    if len({part.shape[1:] for part in parts}) > 1:
        raise ValueError(f"column {name!r} has lists of unlike length; pad or cut them")
    return np.concatenate(parts) if parts else np.empty(0)


def _chunk(name: str, array: Any) -> np.ndarray:
    shape = [len(array)]
    array = getattr(array, "storage", array)  # of an array of `datasets`, where that is imported
    while _is_list(array.type):
        lengths = set(import_module("pyarrow.compute").list_value_length(array).to_pylist())
        if len(lengths) > 1 or None in lengths:
            raise ValueError(f"column {name!r} has lists of unlike length; pad or cut them")
        shape.append(lengths.pop())
        array = array.flatten()
    if array.null_count:
        raise ValueError(f"column {name!r} has a list with an empty place; fill it in")
    texts = str(array.type) in ("string", "large_string")
    values = np.array(array.to_pylist(), str) if texts else array.to_numpy(zero_copy_only=False)
    return values.reshape(shape)


def _is_list(kind: Any) -> bool:
    types, kind = import_module("pyarrow.types"), getattr(kind, "storage_type", kind)
    return any(check(kind) for check in (types.is_list, types.is_large_list, types.is_fixed_size_list))
