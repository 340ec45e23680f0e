"""Damage to files, for fuzzing: bytes flipped, cut, repeated and overwritten, JSON and arrays of another form."""

import numpy as np

_EDGES = (b"\0", b"\xff", b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\n", b"{", b"[" * 50)
ODD = (
    *(None, True, 0, -1, 5.5, 1e308, float("nan"), float("inf"), 2**31, 2**63, 10**30),
    *("", "x", "\0", "\ud800", "=1+2", "[/b]", "x" * 300, "../..", [], [[]], {}, [1, 2], {"x": 1}, [None] * 3),
)


def damaged(content, rng, least=1):
    """The content with one to five changes.

    Args:
        least: bytes that remain at least.
    """
    changed = bytearray(content)
    for _ in range(rng.randint(1, 5)):
        # Heads are at the beginning, directories of archives at the end.
        span = rng.choice((16, 512, len(changed)))
        place = rng.randrange(min(span, len(changed)) or 1)
        place = max(len(changed) - 1 - place, 0) if rng.random() < 0.3 else place
        kind = rng.randrange(5)
        if kind == 0:
            changed[place : place + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            edge = rng.choice(_EDGES)
            changed[place : place + len(edge)] = edge
        elif kind == 2 and place >= least:
            del changed[place:]
        elif kind == 3:
            changed[place:place] = changed[place : place + rng.randrange(1, 40)]
        else:
            del changed[place : place + rng.randrange(1, 9)]
    return bytes(changed)


def damaged_json(value, rng, odd=ODD):
    """A nested value with one place of it replaced, removed or added."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {other: item for other, item in value.items() if other != key}
        if rng.random() < 0.1:
            return {**value, rng.choice(("x", "", 7, None, "name")): rng.choice(odd)}
        return {**value, key: damaged_json(value[key], rng, odd)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value[:place]
        return [*value[:place], damaged_json(value[place], rng, odd), *value[place + 1 :]]
    return rng.choice(odd)


def damaged_arrays(arrays, rng):
    """Named arrays with one of them missing, or of another type, shape or content."""
    name = rng.choice(list(arrays))
    array = arrays[name]
    kind = rng.randrange(6)
    if kind == 0:
        return {other: content for other, content in arrays.items() if other != name}
    if kind == 1:
        kinds = ("<i8", ">i4", "<f8", "<f2", "<U3", "|S2", "?", "<u8", "<c16", "<M8[s]")
        changed = np.zeros(array.shape, rng.choice(kinds))
    elif kind == 2:
        changed = array.reshape(rng.choice(((-1,), (1, *array.shape), (*array.shape, 1))))
    elif kind == 3:
        changed = array[: rng.randrange(len(array) + 1)] if array.ndim else np.zeros(3)
    elif kind == 4:
        changed = np.array(rng.choice((5, -1, "x", 1.5, np.nan)))
    else:
        changed = array.astype(np.float64) if array.dtype.kind in "biuf" else np.zeros(2)
        if changed.size:
            changed.flat[rng.randrange(changed.size)] = rng.choice((-1, 5.5, np.nan, np.inf, 1e300, 2.0**40))
    return {**arrays, name: changed}
