"""Names to objects, with a suggestion for a name that is almost right."""

import difflib
from collections.abc import Iterator, Mapping
from typing import TypeVar

from pflmpi.errors import ConfigError

T = TypeVar("T")


def unknown(kind: str, name: str, known: list[str]) -> str:
    """Error text for an unknown name, with the nearest known one."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    return f"unknown {kind} {name!r}{hint} known: {', '.join(sorted(known))}"


class Registry(Mapping[str, T]):
    """A read-only mapping from name to object that raises `ConfigError` with a suggestion.

    >>> Registry("fruit", {"apple": 1})["aple"]
    Traceback (most recent call last):
    pflmpi.errors.ConfigError: unknown fruit 'aple'; did you mean 'apple'? known: apple
    """

    def __init__(self, kind: str, objects: dict[str, T]) -> None:
        self.kind = kind
        self._objects = objects

    def __getitem__(self, name: str) -> T:
        if name not in self._objects:
            raise ConfigError(unknown(self.kind, name, list(self._objects)))
        return self._objects[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._objects))

    def __len__(self) -> int:
        return len(self._objects)
