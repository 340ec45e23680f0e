"""NumPy arrays, numbers, texts, lists and dictionaries from a pickle, in which nothing is called.

A pickle may name any function to be called. Here the three names that arrays need stand for records of this file, and
every other name is refused; NumPy gets bytes, a shape and a plain type at the end.
"""

import io
import pickle
from typing import Any

import numpy as np

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
        if not isinstance(kind, _Type) or not isinstance(shape, tuple) or not all(type(one) is int for one in shape):
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
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"it holds a {type(value).__name__}, which is no data")
