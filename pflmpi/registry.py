"""Names to objects: the package's own, those of installed packages, and `module:Class` or `file.py:Class`.

What is expected of a class from outside is checked, with errors that say which part of it is missing or wrong.
"""

import difflib
import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from pflmpi import outside
from pflmpi.errors import ConfigError
from pflmpi.text import short_repr

T = TypeVar("T")


def format_unknown_name(kind: str, name: str, known: list[str], near: int = 1) -> str:
    """Error text for an unknown name, with at most `near` similar known ones."""
    nearest = difflib.get_close_matches(name[:100], known, n=near)
    hint = f"; did you mean {', '.join(map(repr, nearest))}?" if nearest else ";"
    return f"unknown {kind} {short_repr(name)}{hint} known: {', '.join(sorted(known))}"


class Registry(Mapping[str, T]):
    """A read-only mapping from name to object that raises `ConfigError` with a suggestion.

    Args:
        kind: what the objects are, for errors.
        objects: the package's own.
        group: entry points by which installed packages add theirs; "" for none.
        accept: checks an object from outside and returns the one to register; raises `ConfigError` if it is wrong.
        section: section of the configuration in which a file can be given as `path` instead; "" for none.

    >>> Registry("fruit", {"apple": 1})["aple"]
    Traceback (most recent call last):
    pflmpi.errors.ConfigError: unknown fruit 'aple'; did you mean 'apple'? known: apple
    """

    def __init__(
        self,
        kind: str,
        objects: dict[str, T],
        group: str = "",
        accept: Callable[[object], T] | None = None,
        section: str = "",
    ) -> None:
        self.kind, self._section = kind, section
        self._objects, self._group, self._accept = objects, group, accept
        self._loaded_names: dict[T, str] = {}

    @cached_property
    def installed(self) -> dict[str, EntryPoint]:
        """Entry points of installed packages, by name."""
        points: dict[str, EntryPoint] = {}
        for point in entry_points(group=self._group) if self._group else ():
            other = points.get(point.name)
            if point.name in self._objects or (other and other.value != point.value):
                raise ConfigError(
                    f"{self.kind} {point.name!r} is registered twice: by {_owner(other)} and by {_owner(point)} "
                    f"({point.value}); uninstall one of them, or rename it there"
                )
            points[point.name] = point
        return points

    def reference(self, name: str) -> str | None:
        """`module:Class` or `file.py:Class` of a name; None for the package's own names, and for unknown ones."""
        if name in self._objects:
            return None
        if name in self.installed:
            return self.installed[name].value
        return name if outside.is_reference(name) else None

    def name_of(self, value: T) -> str:
        """The name by which an object was looked up, also one of a file that has changed since; `KeyError` if none."""
        own = (name for name, registered in self._objects.items() if registered is value)
        return next(own, None) or self._loaded_names[value]

    def __getitem__(self, name: str) -> T:
        if name not in self.installed and name in self._objects:
            return self._objects[name]
        reference = self.reference(name)
        if self._accept is None or reference is None:
            is_file = self._section and (Path(name).suffix or os.path.exists(name))
            hint = f"; for a file or folder: {self._section}: {{path: {short_repr(name)}}}" if is_file else ""
            raise ConfigError(format_unknown_name(self.kind, name, list(self)) + hint)
        try:
            value = self._accept(outside.load(reference))
        except ConfigError as error:
            raise ConfigError(f"{self.kind} {name!r}: {error}") from error
        self._loaded_names.setdefault(value, name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._objects, *self.installed}))

    def __len__(self) -> int:
        return len({*self._objects, *self.installed})


def _owner(point: EntryPoint | None) -> str:
    if point is None:
        return "pflmpi itself"
    return f"the package {point.dist.name}" if point.dist else point.value


def accept_subclass(base: type, *needed: str, of_client: Collection[str] = ()) -> Callable[[object], Any]:
    """Make an `accept` for subclasses of `base` that have the class attributes `needed`.

    Their methods must take the arguments that `base` declares; those named in `of_client` may take `client` as well, by
    which they say that they depend on it.
    """

    def accept(cls: object) -> type:
        wanted = f"expected a subclass of {base.__module__}.{base.__qualname__}"
        if not isinstance(cls, type):
            raise ConfigError(f"it is a {type(cls).__name__}; {wanted}")
        if not issubclass(cls, base):
            raise ConfigError(
                f"it is a subclass of {', '.join(parent.__qualname__ for parent in cls.__bases__)}; {wanted}"
            )
        missing = sorted(getattr(cls, "__abstractmethods__", ()))
        for name in (*missing, *(name for name in needed if not hasattr(cls, name))):
            raise ConfigError(f"{cls.__qualname__}.{name} is missing; expected {_described(base, name)}")
        if own := [name for name in inspect.get_annotations(cls) if not _is_field(cls, name)]:
            raise ConfigError(
                f"{cls.__qualname__}.{own[0]} is no field yet; expected @dataclass(frozen=True, kw_only=True) above "
                "the class, or ClassVar[...] as its type"
            )
        for name, method in vars(cls).items():
            _check_signature(cls, name, method, getattr(base, name, None), name in of_client)
        return cls

    return accept


def accept_function(*arguments: str, returns: str) -> Callable[[object], Any]:
    """Make an `accept` for functions with exactly these arguments; its error says what they must return."""

    def accept(value: object) -> Any:
        if not inspect.isfunction(value) or [*inspect.signature(value).parameters] != [*arguments]:
            raise ConfigError(f"expected a function f({', '.join(arguments)}): {returns}")
        return value

    return accept


def _check_signature(kind: type, name: str, method: object, expected: object, of_client: bool) -> None:
    if not (inspect.isfunction(method) and inspect.isfunction(expected)) or name.startswith("_"):
        return
    arguments = list(inspect.signature(expected).parameters)
    forms = [arguments, [*arguments, "client"]] if of_client else [arguments]
    if sum(_takes(method, form) for form in forms) != 1:
        allowed = " or ".join(f"({', '.join(form)})" for form in forms)
        raise ConfigError(f"{kind.__qualname__}.{name} takes {inspect.signature(method)}; expected {allowed}")


def _takes(method: Callable[..., object], arguments: list[str]) -> bool:
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError:
        return False
    return True


def _is_field(kind: type, name: str) -> bool:
    typed = str(inspect.get_annotations(kind)[name])
    return "ClassVar" in typed or ("__dataclass_fields__" in vars(kind) and name in vars(kind)["__dataclass_fields__"])


def _described(base: type, name: str) -> str:
    """Signature and summary of a member of a class, or how to write it as a class attribute."""
    member = inspect.getattr_static(base, name, None)
    arguments = f"{inspect.signature(member)}" if inspect.isfunction(member) else ""
    about = (inspect.getdoc(member) or "").partition("\n")[0] if arguments or isinstance(member, property) else ""
    return f"{name}{arguments}: {about}" if about else f"a class attribute: {name}: ClassVar[str] = ..."
