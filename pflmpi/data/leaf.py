"""Reads LEAF's JSON files: train/*.json and test/*.json, with `users` and the x and y of each in `user_data`."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from pflmpi.data.array_files import OwnArrays, concatenate_parts
from pflmpi.text import first_line, short_repr


def is_leaf(folder: Path) -> bool:
    """Whether a folder has such files."""
    return any((folder / "train").glob("*.json"))


def read_users(file: Path) -> list[tuple[str, Any, Any]]:
    """Reads every user of a file in its order, with x and y as parsed; `ValueError` for a damaged or another file."""
    try:
        content = json.loads(file.read_bytes())
        users = content["users"]
        if not isinstance(users, list) or not all(isinstance(user, str) for user in users):
            raise ValueError("`users` is no list of names")
        if len(set(users)) < len(users):
            raise ValueError("a user is named twice")
        return [(user, content["user_data"][user]["x"], content["user_data"][user]["y"]) for user in users]
    except KeyError as error:
        raise ValueError(f"no {short_repr(error.args[0])} in it") from error
    except (TypeError, RecursionError) as error:
        raise ValueError(first_line(error)) from error


def read_leaf(folder: Path) -> OwnArrays:
    """Reads the samples of all users, who are the clients.

    Where x and y are text, as in Shakespeare, x [n, L] become character indices: the characters in x of all users are
    numbered from 1 in Unicode order, and 0 pads shorter texts.

    Raises:
        ValueError: a file is damaged, or holds samples of other kinds or shapes than the first.
    """
    parts: list[tuple[str, np.ndarray, np.ndarray]] = []
    users, sides = [], []
    for side in ("train", "test"):
        for file in sorted((folder / side).glob("*.json")):
            try:
                for user, x, y in read_users(file):
                    parts.append(
                        (f"user {user!r} of {file}", _to_array(user, x, np.float32), _to_array(user, y, np.float64))
                    )
                    users.append(user)
                    sides.append(side)
            except ValueError as error:
                raise ValueError(f"{file}: {first_line(error)}") from error
    x, y, part = concatenate_parts(parts)
    client, test = np.array(users)[part], np.array(sides)[part] == "test"
    if x.dtype.kind != "U":
        return OwnArrays(x, y, client, test)
    if x.ndim == 1 and y.dtype.kind == "U":
        numbers, characters = _encode_characters(x)
        return OwnArrays(numbers, y, client, test, characters=characters)
    raise ValueError(
        f"x are texts {list(x.shape)} and y {y.dtype}; expected numbers, or a text and as label another, such as "
        "its next character: turn texts and names of pictures into numbers"
    )


def _to_array(user: str, values: Any, float_type: type[np.floating[Any]]) -> np.ndarray:
    """Converts a user's values to an array of integers, of text, or of floats of the given type."""
    try:
        array = np.atleast_1d(np.array(values))
    except ValueError as error:
        raise ValueError(f"user {user!r}: it has lists of unlike length; expected numbers, or texts") from error
    if array.dtype.kind not in "biufU":
        raise ValueError(f"user {user!r}: it holds {array.dtype}; expected numbers, or texts")
    with np.errstate(over="ignore"):  # what overflows is refused later, with all that is not finite
        return array.astype(float_type) if array.dtype.kind == "f" else array


def _encode_characters(texts: np.ndarray) -> tuple[np.ndarray, str]:
    """Converts texts [n] to character indices [n, L], where 0 is padding; also returns the characters from 1."""
    codes = np.ascontiguousarray(texts).view(np.uint32).reshape(len(texts), -1)
    present = np.zeros(0x110000, np.int32)
    present[codes] = 1
    present[0] = 0
    numbers = present.cumsum(dtype=np.int32)
    return numbers[codes], "".join(map(chr, np.flatnonzero(present)))
