"""A folder as PFLlib writes it: train/0.npz, test/0.npz, ... for each client, and a config.json.

Its arrays are pickled, and a pickle may name any function to be called. Here the three names that arrays need stand
for records of this file, and every other name is refused; NumPy gets bytes, a shape and a plain type at the end.
"""

import io
import json
import pickle
import zipfile
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from pflmpi.data.array_files import OwnArrays, check_memory, joined
from pflmpi.data.dataset import as_numbers, first_missing, whole

_MODULES = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray")


def read_pickle(content: bytes) -> Any:
    """The value of a pickle.

    Raises:
        ValueError: it is damaged, or holds anything else.
    """
    try:
        return _plain(_Reader(io.BytesIO(content)).load())
    except ValueError:
        raise
    except Exception as error:  # a damaged pickle raises a dozen kinds
        raise ValueError(f"it is no pickle of arrays ({type(error).__name__})") from error


class _Type:
    """`numpy.dtype(code, ...)` and what is said of it."""

    def __init__(self, code: object, *_: object) -> None:
        self._code, self._order = str(code), "|"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._order = str(state[1])

    def made(self) -> np.dtype:
        """A type of numbers, flags or texts, or of objects."""
        kind = np.dtype(self._code)
        if kind.kind not in "biufUSO" or kind.hasobject != (self._code in ("O", "O8")):
            raise ValueError(f"an array of {self._code} is not expected")
        return kind.newbyteorder(">") if self._order == ">" else kind.newbyteorder("<") if self._order == "<" else kind


class _Array:
    """An array as a pickle describes it."""

    state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def made(self) -> np.ndarray:
        """The array; one of objects from plain values."""
        _, shape, kind, fortran, content = self.state
        if not isinstance(kind, _Type) or not isinstance(shape, tuple) or not all(type(size) is int for size in shape):
            raise ValueError("an array in it has no shape or type")
        dtype = kind.made()
        if not dtype.hasobject:
            return np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")
        flat = np.empty(len(content), object)
        for place, value in enumerate(content):
            flat[place] = _plain(value)
        return flat.reshape(shape, order="F" if fortran else "C")


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in _MODULES and name == "_reconstruct":
            return lambda *_: _Array()
        if module in _MODULES and name == "ndarray":
            return _Array
        if module in _MODULES and name == "dtype":
            return _Type
        if module in _MODULES and name == "scalar":
            return _scalar
        raise ValueError(f"it would call {module}.{name}, which no data needs; do not trust this file")


def _scalar(kind: _Type, content: bytes) -> Any:
    (value,) = np.frombuffer(content, kind.made())
    return value.item()


def _plain(value: Any) -> Any:
    if isinstance(value, _Array):
        return value.made()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"it holds a {type(value).__name__}, which is no data")


_ANEW = "clients are counted from 0 without a gap: leave it out of train/ and test/ and number the others anew"


def is_split_by_client(path: Path) -> bool:
    """Whether a folder has the files of clients."""
    return any((path / "train").glob("*.npz"))


def read_folder(path: Path) -> OwnArrays:
    """The samples in a folder; nothing in its files is called.

    Raises:
        ValueError: a file is missing, damaged, or holds anything but arrays.
    """
    numbers = [_numbers(path / side) for side in ("train", "test")]
    for client in sorted(numbers[1] - numbers[0]):
        raise ValueError(f"test/{client}.npz has no train/{client}.npz beside it")
    if len(numbers[0]) <= max(numbers[0]):
        if 0 not in numbers[0]:
            raise ValueError(
                f"train/ begins with {min(numbers[0])}.npz; rename the files in train/ and test/ to 0.npz, 1.npz, ..."
            )
        gap = next(client for client in count() if client not in numbers[0])
        raise ValueError(f"there is no train/{gap}.npz; {_ANEW}")
    config = _config(path / "config.json")
    if (clients := config.get("num_clients")) is not None and clients != len(numbers[0]):
        raise ValueError(f"config.json says {clients} clients, and train/ has {len(numbers[0])} files; make it anew")
    parts, clients, tests = [], [], []
    for test, side in enumerate(("train", "test")):
        for client in sorted(numbers[test]):
            file = path / side / f"{client}.npz"
            try:
                x, y = _arrays(file)
            except ValueError as error:
                raise ValueError(f"{file}: {error}") from error
            if not len(x) and not test:
                raise ValueError(f"{file} has no samples; {_ANEW}")
            parts.append((str(file), x, y))
            clients.append(client)
            tests.append(bool(test))
    x, y, part = joined(parts)
    client_of, tested = np.array(clients)[part], np.array(tests)[part]
    classes = config.get("num_classes")
    if classes is not None and not ((y := whole("y", as_numbers(y))).min() >= 0 and y.max() < classes):
        raise ValueError(f"config.json says {classes} classes, and y has labels {y.min()} to {y.max()}")
    return OwnArrays(x, y, client_of, tested, num_classes=classes)


def _numbers(folder: Path) -> set[int]:
    names = [file.stem for file in folder.glob("*.npz")]
    for name in names:
        if not name.isdecimal() or str(int(name)) != name:
            raise ValueError(f"{folder.name}/{name}.npz: expected the number of a client, as in {folder.name}/0.npz")
    return {int(name) for name in names}


def _config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    if not path.is_file():
        raise ValueError("config.json is no regular file")
    try:
        values = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"config.json is no JSON ({error})") from error
    if not isinstance(values, dict):
        raise ValueError("config.json holds no mapping")
    counts = {key: values.get(key) for key in ("num_clients", "num_classes")}
    for key, value in counts.items():
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"config.json: {key} = {value!r} is no number of them")
    return counts


def _arrays(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """x and y of a file: its one array `data`, pickled, is {"x": array, "y": array}."""
    if not file.is_file():
        raise ValueError("it is no regular file")
    try:
        with zipfile.ZipFile(file) as archive:
            check_memory(archive.getinfo("data.npy").file_size)
            with archive.open("data.npy") as member:
                np.lib.format.read_magic(member)
                np.lib.format.read_array_header_1_0(member)
                content = member.read()
    except KeyError:
        raise ValueError("it has no array `data`, which PFLlib writes") from None
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(f"it is no .npz archive, or damaged ({error})") from error
    data = read_pickle(content)
    if isinstance(data, np.ndarray) and data.shape == ():
        data = data.item()
    if not isinstance(data, dict) or not {"x", "y"} <= data.keys():
        raise ValueError("`data` is no dictionary with x and y")
    x, y = (np.asarray(data[key]) for key in ("x", "y"))
    if not x.ndim or y.shape != (len(x),):
        raise ValueError(f"x has the shape {list(x.shape)} and y {list(y.shape)}; expected [n, ...] and [n]")
    if (lost := first_missing(y)) is not None:
        raise ValueError(f"sample {lost} has the label {y[lost]}; fill it in, or leave it out")
    return (_tokens(x) if x.dtype.hasobject else x), y


def _tokens(x: np.ndarray) -> np.ndarray:
    """Texts [n, L] of rows (tokens, their number), as its text datasets are; the tokens are padded there."""
    rows = [row[0] for row in x] if x.ndim == 2 and x.shape[1] == 2 else []
    if not rows or any(not isinstance(row, list) or len(row) != len(rows[0]) for row in rows):
        raise ValueError("x is an array of objects, and not of pairs of tokens of one length and their number")
    return np.array(rows)
