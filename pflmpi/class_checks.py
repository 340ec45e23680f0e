"""What is expected of a class from outside the package, and errors that say which part of it is missing or wrong."""

import inspect
from collections.abc import Callable, Collection
from typing import Any

from pflmpi.errors import ConfigError


def subclass(base: type, *needed: str, of_client: Collection[str] = ()) -> Callable[[object], Any]:
    """What accepts a class with the methods of `base`, and the class attributes that are needed besides.

    The methods that it defines must take the arguments that `base` gives them; those named in `of_client` may take
    `client` as one more, which is how they say that they depend on it.
    """

    def accept(found: object) -> type:
        wanted = f"expected a subclass of {base.__module__}.{base.__qualname__}"
        if not isinstance(found, type):
            raise ConfigError(f"it is a {type(found).__name__}; {wanted}")
        if not issubclass(found, base):
            raise ConfigError(
                f"it is a subclass of {', '.join(each.__qualname__ for each in found.__bases__)}; {wanted}"
            )
        missing = sorted(getattr(found, "__abstractmethods__", ()))
        for name in (*missing, *(name for name in needed if not hasattr(found, name))):
            raise ConfigError(f"{found.__qualname__}.{name} is missing; expected {_described(base, name)}")
        if own := [name for name in inspect.get_annotations(found) if not _is_field(found, name)]:
            raise ConfigError(
                f"{found.__qualname__}.{own[0]} is no field yet; expected @dataclass(frozen=True, kw_only=True) above "
                "the class, or ClassVar[...] as its type"
            )
        for name, method in vars(found).items():
            _check_signature(found, name, method, getattr(base, name, None), name in of_client)
        return found

    return accept


def _check_signature(found: type, name: str, method: object, expected: object, of_client: bool) -> None:
    if not (inspect.isfunction(method) and inspect.isfunction(expected)) or name.startswith("_"):
        return
    arguments = list(inspect.signature(expected).parameters)
    forms = [arguments, [*arguments, "client"]] if of_client else [arguments]
    if sum(_takes(method, form) for form in forms) != 1:
        allowed = " or ".join(f"({', '.join(form)})" for form in forms)
        raise ConfigError(f"{found.__qualname__}.{name} takes {inspect.signature(method)}; expected {allowed}")


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
    member = inspect.getattr_static(base, name, None)
    arguments = f"{inspect.signature(member)}" if inspect.isfunction(member) else ""
    about = (inspect.getdoc(member) or "").partition("\n")[0] if arguments or isinstance(member, property) else ""
    return f"{name}{arguments}: {about}" if about else f"a class attribute: {name}: ClassVar[str] = ..."
