"""Reads a folder as PFLlib writes it: train/0.npz, test/0.npz, ... for each client, and a config.json.

Its arrays are pickled, and a pickle may call any function that it names. Here the names that arrays need resolve to
classes of this file, and every other name is refused; NumPy only gets bytes, a shape and a plain dtype. Its own
constructors would also make an array of objects from bytes, which are then addresses.
"""

import io
import json
import pickle
import zipfile
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from pflmpi.data.array_files import OwnArrays, check_memory, concatenate_parts
from pflmpi.data.numbers import find_missing, to_integers, to_numbers

_MODULES = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray")


def read_pickle(content: bytes) -> Any:
    """Reads a pickle of arrays and plain values; `ValueError` if it is damaged, or holds anything else."""
    try:
        return _to_plain(_Reader(io.BytesIO(content)).load())
    except ValueError:
        raise
    except Exception as error:  # a damaged pickle raises a dozen kinds
        raise ValueError(f"it is no pickle of arrays ({type(error).__name__})") from error


class _Type:
    """A pickled `numpy.dtype(code, ...)`."""

    def __init__(self, code: object, *_: object) -> None:
        self._code, self._order = str(code), "|"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._order = str(state[1])

    def to_numpy(self) -> np.dtype:
        """Returns a dtype of numbers, flags, text or objects; `ValueError` for others."""
        dtype = np.dtype(self._code)
        if dtype.kind not in "biufUSO" or dtype.hasobject != (self._code in ("O", "O8")):
            raise ValueError(f"an array of {self._code} is not expected")
        if self._order == ">":
            return dtype.newbyteorder(">")
        return dtype.newbyteorder("<") if self._order == "<" else dtype


class _Array:
    """A pickled array."""

    state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def to_numpy(self) -> np.ndarray:
        """Returns the array; the objects in one of objects are plain values."""
        _, shape, pickled_type, fortran, content = self.state
        has_shape = isinstance(shape, tuple) and all(type(size) is int for size in shape)
        if not has_shape or not isinstance(pickled_type, _Type):
            raise ValueError("an array in it has no shape or type")
        dtype = pickled_type.to_numpy()
        if not dtype.hasobject:
            return np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")
        flat = np.empty(len(content), object)
        for place, value in enumerate(content):
            flat[place] = _to_plain(value)
        return flat.reshape(shape, order="F" if fortran else "C")


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        allowed = {"_reconstruct": lambda *_: _Array(), "ndarray": _Array, "dtype": _Type, "scalar": _to_scalar}
        if module in _MODULES and name in allowed:
            return allowed[name]
        raise ValueError(f"it would call {module}.{name}, which no data needs; do not trust this file")


def _to_scalar(pickled_type: _Type, content: bytes) -> Any:
    (value,) = np.frombuffer(content, pickled_type.to_numpy())
    return value.item()


def _to_plain(value: Any) -> Any:
    """Converts pickled arrays, also in lists and dictionaries, to NumPy; `ValueError` for values that are not plain."""
    if isinstance(value, _Array):
        return value.to_numpy()
    if isinstance(value, dict):
        return {key: _to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"it holds a {type(value).__name__}, which is no data")


_ANEW = "clients are counted from 0 without a gap: leave it out of train/ and test/ and number the others anew"


def is_split_by_client(path: Path) -> bool:
    """Whether a folder has one file for each client."""
    return any((path / "train").glob("*.npz"))


def read_pfllib(path: Path) -> OwnArrays:
    """Reads the samples in a folder, calling nothing in its files; `ValueError` for anything but arrays."""
    in_train, in_test = _client_numbers(path / "train"), _client_numbers(path / "test")
    for client in sorted(in_test - in_train):
        raise ValueError(f"test/{client}.npz has no train/{client}.npz beside it")
    if 0 not in in_train:
        raise ValueError(
            f"train/ begins with {min(in_train)}.npz; rename the files in train/ and test/ to 0.npz, 1.npz, ..."
        )
    if len(in_train) <= max(in_train):
        gap = next(client for client in count() if client not in in_train)
        raise ValueError(f"there is no train/{gap}.npz; {_ANEW}")
    config = _read_config(path / "config.json")
    num_clients, num_classes = config.get("num_clients"), config.get("num_classes")
    if num_clients is not None and num_clients != len(in_train):
        raise ValueError(f"config.json says {num_clients} clients, and train/ has {len(in_train)} files; make it anew")
    parts, clients, is_test = [], [], []
    for split, numbers in (("train", in_train), ("test", in_test)):
        for client in sorted(numbers):
            file = path / split / f"{client}.npz"
            try:
                x, y = _read_arrays(file)
            except ValueError as error:
                raise ValueError(f"{file}: {error}") from error
            if not len(x) and split == "train":
                raise ValueError(f"{file} has no samples; {_ANEW}")
            parts.append((str(file), x, y))
            clients.append(client)
            is_test.append(split == "test")
    x, y, part_numbers = concatenate_parts(parts)
    if num_classes is not None:
        y = to_integers("y", to_numbers(y))
        if y.min() < 0 or y.max() >= num_classes:
            raise ValueError(f"config.json says {num_classes} classes, and y has labels {y.min()} to {y.max()}")
    return OwnArrays(x, y, np.array(clients)[part_numbers], np.array(is_test)[part_numbers], num_classes=num_classes)


def _client_numbers(folder: Path) -> set[int]:
    """Returns the clients whose files are in a folder."""
    names = [file.stem for file in folder.glob("*.npz")]
    for name in names:
        if not name.isdecimal() or str(int(name)) != name:
            raise ValueError(f"{folder.name}/{name}.npz: expected the number of a client, as in {folder.name}/0.npz")
    return {int(name) for name in names}


def _read_config(path: Path) -> dict[str, Any]:
    """Reads the numbers of clients and classes, None where they are not given; {} without the file."""
    if not path.exists():
        return {}
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


def _read_arrays(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Reads x and y of a file: its one array `data` is a pickled {"x": array, "y": array}."""
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
    if (missing := find_missing(y)) is not None:
        raise ValueError(f"sample {missing} has the label {y[missing]}; fill it in, or leave it out")
    return (_unpack_tokens(x) if x.dtype.hasobject else x), y


def _unpack_tokens(x: np.ndarray) -> np.ndarray:
    """Returns the tokens [n, L] of rows (padded tokens, their number), as PFLlib's text datasets have them."""
    rows = [row[0] for row in x] if x.ndim == 2 and x.shape[1] == 2 else []
    if not rows or any(not isinstance(row, list) or len(row) != len(rows[0]) for row in rows):
        raise ValueError("x is an array of objects, and not of pairs of tokens of one length and their number")
    return np.array(rows)
