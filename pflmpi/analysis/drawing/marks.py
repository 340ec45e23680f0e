"""The shapes of marks, as polygons around their centre."""

from functools import cache

import numpy as np


def polygon(shape: str) -> np.ndarray:
    """Corners [n, 2] of a shape of radius 1: circle, square, diamond, triangles, plus, cross, star."""
    return _POLYGONS[shape]


@cache
def outline(shape: str, radius: float) -> str:
    """An SVG path around the point where it begins, in relative coordinates."""
    if shape == "o":
        half = f"a{radius:g} {radius:g} 0 1 0 "
        return f"m{-radius:g} 0{half}{2 * radius:g} 0{half}{-2 * radius:g} 0z"
    corners = radius * polygon(shape)
    steps = np.diff(corners, axis=0, prepend=np.zeros((1, 2))).round(2).tolist()
    (x, y), *rest = steps
    return f"m{x:g} {y:g}l{' '.join(f'{right:g} {down:g}' for right, down in rest)}z"


def _round(corners: int, start: float = 0.0) -> np.ndarray:
    angles = np.radians(start) + 2 * np.pi * np.arange(corners) / corners
    return np.stack([np.sin(angles), -np.cos(angles)], 1)


def _star() -> np.ndarray:
    return np.asarray(_round(10) * np.where(np.arange(10) % 2, 0.42, 1.15)[:, np.newaxis])


_PLUS = np.array(
    [(-1, -3), (1, -3), (1, -1), (3, -1), (3, 1), (1, 1), (1, 3), (-1, 3), (-1, 1), (-3, 1), (-3, -1), (-1, -1)]
)
_POLYGONS: dict[str, np.ndarray] = {
    "o": _round(24),
    "s": _round(4, 45) * 1.2,
    "D": _round(4) * 1.2,
    "^": _round(3) * 1.2,
    "v": _round(3, 180) * 1.2,
    "P": _PLUS / 3 * 1.1,
    "X": _PLUS / 3 @ np.array([[1, 1], [-1, 1]]) / 2**0.5 * 1.1,
    "*": _star(),
}
