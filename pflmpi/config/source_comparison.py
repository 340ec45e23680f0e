"""Compares what is in memory with what its source makes: functions, classes and constants of a notebook or script."""

import copyreg
import dis
from collections.abc import Iterator
from types import CodeType, FunctionType, MappingProxyType
from typing import TypeGuard

from pflmpi.folder_modules import CLASSES

MAIN_MODULES = ("__main__", "__mp_main__")  # the latter in a process that multiprocessing spawned
# Which every class has, and which depend on where it is defined.
_CLASS_ATTRIBUTES = {
    "__module__",
    "__dict__",
    "__weakref__",
    "__firstlineno__",
    "__annotations__",
    "__annotations_cache__",
    "__slotnames__",  # which taking its objects apart leaves there
    "__doc__",  # of a data class, with the module of its defaults
    "_abc_impl",
}
_PLAIN = (bool, int, float, complex, str, bytes)


def find_changes(name: str, value: object, executed: object) -> Iterator[str]:
    """Yields what differs between a value and that of its executed source: attributes of a class, or its name.

    Functions are alike if their instructions, defaults, closures and attributes are; classes of the main module and of
    its executed source if their attributes are, other classes if their names are; other objects if their parts are, or,
    where pickle refuses them, their classes.

    >>> list(find_changes("f", lambda x: x == 1, lambda x: x == 1)), list(find_changes("f", lambda x: x, lambda x: -x))
    ([], ['f'])
    """
    if not (_is_of_main(value) and _is_of_main(executed)):
        yield from () if _are_alike(value, executed, {}) else (name,)
        return
    before, now = _own_attributes(executed), _own_attributes(value)
    for attribute in sorted({*before} | {*now}):
        pair = before.get(attribute), now.get(attribute)
        if not _are_alike(*pair, {(id(executed), id(value)): (executed, value)}):  # its methods may refer to it
            yield attribute


def _is_of_main(value: object) -> TypeGuard[type]:
    """Whether a value is a class of the main module, or of its executed source."""
    return isinstance(value, type) and value.__module__ in (*MAIN_MODULES, CLASSES)


def _own_attributes(kind: type) -> dict[str, object]:
    """Returns the attributes that the source of a class gives it."""
    return {name: value for name, value in vars(kind).items() if name not in _CLASS_ATTRIBUTES}


def _are_alike(value: object, other: object, compared: dict[tuple[int, int], tuple[object, object]]) -> bool:
    """Whether two values are alike; pairs in `compared` count as alike, since a difference in them ends it all."""
    if value is other or (id(value), id(other)) in compared:
        return True
    if type(value) in _PLAIN:
        return type(value) is type(other) and repr(value) == repr(other)
    compared[id(value), id(other)] = value, other  # which keeps them: no other object gets their ids
    try:
        parts, others = [*_list_parts(value)], [*_list_parts(other)]
    except Exception:  # objects of its class cannot be taken apart
        return type(value) is type(other)
    pairs = zip(parts, others, strict=False)
    return len(parts) == len(others) and all(_are_alike(part, other, compared) for part, other in pairs)


def _list_parts(value: object) -> Iterator[object]:
    """Yields what a value is made of."""
    if isinstance(value, type):
        yield from (value.__qualname__, _own_attributes(value) if _is_of_main(value) else value.__module__)
        return
    yield type(value)
    if isinstance(value, CodeType):
        yield from (value.co_qualname, value.co_varnames, value.co_argcount, value.co_posonlyargcount)
        yield from (value.co_kwonlyargcount, value.co_flags & 12)  # *args and **kwargs
        yield from _list_instructions(value)
    elif isinstance(value, FunctionType):
        yield from (value.__code__, value.__defaults__, value.__kwdefaults__, vars(value))
        yield from (cell.cell_contents for cell in value.__closure__ or ())
    elif isinstance(value, property):
        yield from (value.fget, value.fset, value.fdel)
    elif isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, set | frozenset):
        yield from sorted(value, key=repr)
    elif isinstance(value, dict | MappingProxyType):
        yield from value.items()
    elif hasattr(value, "__wrapped__"):  # a static or class method, or a function with a cache
        yield value.__wrapped__
    elif hasattr(value, "dtype") and hasattr(value, "tolist"):  # an array or tensor
        yield from (str(value.dtype), repr(value.tolist()))
    else:
        reduce = copyreg.dispatch_table.get(type(value))  # as pickle takes objects apart
        reduced = reduce(value) if reduce else value.__reduce_ex__(4)
        is_name = isinstance(reduced, str)  # in its module, or in what it is a method of
        yield from (reduced, str(getattr(value, "__self__", ""))) if is_name else reduced


def _list_instructions(code: CodeType) -> Iterator[object]:
    """Yields name and argument of each instruction.

    Without what an import in the same cell changes: how a method is loaded, and with it the addresses of jumps.
    """
    positions, instructions = dict[int, int](), list[dis.Instruction]()
    for instruction in dis.get_instructions(code):
        positions[instruction.offset] = len(instructions)
        if instruction.opname not in ("PUSH_NULL", "EXTENDED_ARG"):
            instructions.append(instruction)
    for instruction in instructions:
        yield instruction.opname.replace("LOAD_METHOD", "LOAD_ATTR")
        yield positions[instruction.argval] if instruction.opcode in dis.hasjrel else instruction.argval
