"""Classes and functions defined in a notebook or script, as files that other processes can import."""

import ast
import hashlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from symtable import SymbolTable, symtable
from types import CodeType
from typing import Any

from pflmpi import atomic
from pflmpi.errors import ConfigError

FOLDER = "pflmpi_classes"  # in the working directory


def reference(section: str, kind: Any) -> str:
    """`module:Class` of a class or function; of the main module `file.py:Class`, in a file written for it.

    The file has the statements of the notebook or script that bind the names it uses, and its name a hash of these.

    Raises:
        ConfigError: the source cannot be found, or does not stand alone.
    """
    name, where = kind.__qualname__, kind.__module__
    instead = f"put it in a file and give {section}={{'name': './my_file.py:{kind.__name__}', ...}}"
    if "<locals>" in name:
        raise ConfigError(f"{section}: {name} is defined where no other process can import it; {instead}")
    if where != "__main__":
        return f"{where}:{name}"
    statements = _statements()
    if name not in statements:
        raise ConfigError(f"{section}: the source of {name} cannot be found; {instead}")
    if getattr(sys.modules[where], name, None) != kind:
        older = f"{kind!r} is not the {name} in the source of this notebook or script any more"
        raise ConfigError(f"{section}: {older}; make it anew, or {instead}")
    needed: dict[str, None] = {}  # in the order in which they are first needed
    for used in _needed(name, statements):
        statement, value = statements[used], getattr(sys.modules[where], used, None)
        text = ast.unparse(statement)
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            if _is_literal(value):  # as it is now, whatever has changed it
                text = f"{used} = {value!r}"
            elif any(isinstance(node, ast.Call) for node in ast.walk(statement)):
                raise ConfigError(f"{section}: {name} uses {used}, a {type(value).__name__} made by a call; {instead}")
        needed[text] = None
    source = "\n\n".join(needed) + "\n"
    made: dict[str, Any] = {"__name__": FOLDER}
    exec(compile(source, f"<source of {name}>", "exec"), made)
    if changed := [*_differing(kind, made[name])]:
        raise ConfigError(f"{section}: {name} is not as its source makes it ({', '.join(changed)}); {instead}")
    file = Path(FOLDER, f"{name}_{hashlib.sha256(source.encode()).hexdigest()[:8]}.py")
    if not file.exists():
        with atomic.refusing(file, instead):
            atomic.write(file, source.encode())
    return f"{file.absolute()}:{name}"


def _statements() -> dict[str, ast.stmt]:
    """The last statement of the notebook or script that binds each name of its main module."""
    main, statements = sys.modules["__main__"], dict[str, ast.stmt]()
    try:
        cells = getattr(main, "In", None) or [inspect.getsource(main)]
    except (OSError, TypeError):  # typed into Python, or given by -c
        return {}
    for cell in cells:
        try:
            body = ast.parse(cell).body
        except SyntaxError:  # which was not executed either
            continue
        for statement in body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                statements |= {(alias.asname or alias.name).partition(".")[0]: statement for alias in statement.names}
            elif isinstance(statement, ast.ClassDef | ast.FunctionDef):
                statements[statement.name] = statement
            elif isinstance(statement, ast.Assign | ast.AnnAssign):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                statements |= {target.id: statement for target in targets if isinstance(target, ast.Name)}
    return statements


def _needed(name: str, statements: dict[str, ast.stmt], seen: tuple[str, ...] = ()) -> Iterator[str]:
    """The names that the statement of a name uses, each after those that it uses itself; it comes last."""
    for used in sorted(set(_global_names(symtable(ast.unparse(statements[name]), "", "exec")))):
        if used in statements and used not in (name, *seen):
            yield from _needed(used, statements, (*seen, name))
    yield name


def _global_names(scope: SymbolTable) -> Iterator[str]:
    """The names that a scope, and those within, take from the module."""
    for symbol in scope.get_symbols():
        if symbol.is_referenced() and (symbol.is_global() or scope.get_type() == "module"):
            yield symbol.get_name()
    for inner in scope.get_children():
        yield from _global_names(inner)


def _differing(kind: Any, made: Any) -> Iterator[str]:
    """The attributes of a class that were changed after it was made from its source."""
    pairs = [vars(each) if isinstance(each, type) else {kind.__name__: each} for each in (kind, made)]
    for name in sorted({*pairs[0]} | {*pairs[1]}):
        if name not in _OF_A_MODULE and _comparable(pairs[0].get(name)) != _comparable(pairs[1].get(name)):
            yield name


_OF_A_MODULE = ("__module__", "__dict__", "__weakref__", "__firstlineno__")  # of a class, wherever it stands


def _comparable(value: object) -> object:
    """Equal for functions of the same place with the same names and constants, and for the same literals.

    Their bytecode would not do: it is another one where an import stands in the same cell.
    """
    if isinstance(value, property):
        return [_comparable(function) for function in (value.fget, value.fset, value.fdel)]
    function = getattr(value, "__func__", value)
    code = function if isinstance(function, CodeType) else getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return value if _is_literal(value) else type(value).__qualname__
    constants = [_comparable(constant) for constant in code.co_consts]
    return getattr(function, "__qualname__", ""), code.co_names, code.co_varnames, constants


def _is_literal(value: object) -> bool:
    """Whether its `repr` makes it again."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False
