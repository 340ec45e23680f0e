"""LEAF's files of users: train/*.json and test/*.json, each with `users` and the x and y of each in `user_data`."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from pflmpi.text import first_line, shown


def is_leaf(folder: Path) -> bool:
    """Whether a folder has such files."""
    return any((folder / "train").glob("*.json"))


def users_of(file: Path) -> list[tuple[str, Any, Any]]:
    """Every user of a file in its order, with x and y as they are there.

    Raises:
        ValueError: it is damaged, or no such file.
    """
    try:
        content = json.loads(file.read_bytes())
        users = content["users"]
        if not isinstance(users, list) or not all(isinstance(user, str) for user in users):
            raise ValueError("`users` is no list of names")
        if len(set(users)) < len(users):
            raise ValueError("a user is named twice")
        return [(user, content["user_data"][user]["x"], content["user_data"][user]["y"]) for user in users]
    except KeyError as error:
        raise ValueError(f"no {shown(error.args[0])} in it") from error
    except (TypeError, RecursionError) as error:
        raise ValueError(first_line(error)) from error


def read_leaf(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """x [n, ...], y [n, ...], the users [n] and whether samples are for testing [n].

    Where x and y are texts, as of Shakespeare, x [n, L] are numbers of characters: 0 pads the shorter texts, and the
    characters in x of all users are counted from 1, in the order of Unicode.

    Raises:
        ValueError: a file is damaged, or holds samples of other kinds or shapes than the first.
    """
    parts: list[tuple[np.ndarray, ...]] = []
    for side in ("train", "test"):
        for file in sorted((folder / side).glob("*.json")):
            if not file.is_file():
                raise ValueError(f"{file} is no regular file")
            try:
                for user, x, y in users_of(file):
                    arrays = _arrays(user, x, y, parts[0] if parts else None)
                    count = len(arrays[0])
                    if count:
                        parts.append((*arrays, np.full(count, user), np.full(count, side == "test")))
            except (ValueError, OverflowError) as error:
                raise ValueError(f"{file}: {first_line(error)}") from error
    if not parts:
        raise ValueError("its JSON files hold no samples")
    x, y, users, test = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return (_characters(x) if x.dtype.kind == "U" else x), y, users, test


def _arrays(user: str, x: Any, y: Any, first: tuple[np.ndarray, ...] | None) -> tuple[np.ndarray, np.ndarray]:
    """x and y of a user; `first` are those of the first one."""
    x, y = np.array(x), np.array(y)
    if not x.ndim or x.shape[:1] != y.shape[:1]:
        raise ValueError(f"user {user!r} has x {list(x.shape)} and y {list(y.shape)}; expected [m, ...] and [m]")
    if not len(x):
        return x, y
    texts = x.dtype.kind == "U" and x.ndim == 1 and y.dtype.kind == "U"
    if not texts and not (x.dtype.kind in "biuf" and y.dtype.kind in "biufU"):
        raise ValueError(
            f"user {user!r} has x {x.dtype} {list(x.shape)} and y {y.dtype}; expected numbers, or a text and a label "
            "that is one too, such as its next character: turn texts and names of pictures into numbers"
        )
    for name, array, like in zip("xy", (x, y), first or (), strict=False):
        if array.shape[1:] != like.shape[1:] or (array.dtype.kind == "U") != (like.dtype.kind == "U"):
            expected = f"{like.dtype} {list(like.shape[1:])}"
            described = f"{array.dtype} {list(array.shape[1:])}"
            raise ValueError(f"user {user!r} has {name} {described}, the first has {expected}")
    with np.errstate(over="ignore"):  # what is too large is refused with all that is not finite
        return (x.astype(np.float32) if x.dtype.kind == "f" else x), y


def _characters(texts: np.ndarray) -> np.ndarray:
    """Numbers [n, L] of the characters of texts [n]; 0 is padding."""
    codes = np.ascontiguousarray(texts).view(np.uint32).reshape(len(texts), -1)
    present = np.zeros(0x110000, np.int32)
    present[codes] = 1
    present[0] = 0
    numbers = present.cumsum(dtype=np.int32)
    return numbers[codes]
