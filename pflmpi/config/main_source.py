"""Classes and functions defined in a notebook or script, as files that other processes can import."""

import ast
import hashlib
import inspect
import sys
from collections.abc import Iterator, Mapping
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
    instead = f"put it in a file and give its name there, './my_file.py:{kind.__name__}'"
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
    now = vars(sys.modules[where])
    try:
        needed = {used: _text(used, statements.get(used), now[used]) for used in _needed(name, statements, now)}
    except ValueError as error:
        raise ConfigError(f"{section}: {name} uses {error}; {instead}") from None
    source = "\n\n".join(dict.fromkeys(needed.values())) + "\n"
    made: dict[str, Any] = {"__name__": FOLDER}
    try:
        exec(compile(source, f"<source of {name}>", "exec"), made)
    except Exception as error:
        raise ConfigError(f"{section}: the source of {name} does not stand alone ({error}); {instead}") from error
    for used in needed:
        if changed := [*_differing(used, now[used], made[used])]:
            raise ConfigError(f"{section}: {used} is not as its source makes it ({', '.join(changed)}); {instead}")
    file = Path(FOLDER, f"{name}_{hashlib.sha256(source.encode()).hexdigest()[:8]}.py")
    if not file.exists():
        with atomic.refusing(file, instead):
            atomic.write(file, source.encode())
    return f"{file.absolute()}:{name}"


def _text(used: str, statement: ast.stmt | None, value: object) -> str:
    """A statement that gives a name its value; a `ValueError` says of what there is none.

    Args:
        statement: the last that binds it at the top level; None: it is bound otherwise.
    """
    if statement is not None and not isinstance(statement, ast.Assign | ast.AnnAssign):
        return ast.unparse(statement)
    if _is_literal(value):  # as it is now, whatever has changed it
        return f"{used} = {value!r}"
    if statement is None:
        raise ValueError(f"{used}, a {type(value).__name__} that no statement of its own makes at the top level")
    if any(isinstance(node, ast.Call) for node in ast.walk(statement)):
        raise ValueError(f"{used}, a {type(value).__name__} made by a call")
    return ast.unparse(statement)


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


def _needed(
    name: str, statements: dict[str, ast.stmt], now: Mapping[str, Any], seen: tuple[str, ...] = ()
) -> Iterator[str]:
    """The names that the statement of a name uses, each after those that it uses itself; it comes last.

    Args:
        now: the names of the main module.
    """
    text = ast.unparse(statements[name]) if name in statements else ""
    for used in sorted(set(_global_names(symtable(text, "", "exec")))):
        if used in now and used not in (name, *seen, "__name__"):
            yield from _needed(used, statements, now, (*seen, name))
    yield name


def _global_names(scope: SymbolTable) -> Iterator[str]:
    """The names that a scope, and those within, take from the module."""
    for symbol in scope.get_symbols():
        if symbol.is_referenced() and (symbol.is_global() or scope.get_type() == "module"):
            yield symbol.get_name()
    for inner in scope.get_children():
        yield from _global_names(inner)


def _differing(used: str, now: Any, made: Any) -> Iterator[str]:
    """What of a value was changed after it was made from its source: attributes of a class, or all of it."""
    if now is made:  # imported
        return
    pairs = [vars(each) if isinstance(each, type) else {used: each} for each in (now, made)]
    for name in sorted({*pairs[0]} | {*pairs[1]}):
        if name not in _OF_A_MODULE and _comparable(pairs[0].get(name)) != _comparable(pairs[1].get(name)):
            yield name


_OF_A_MODULE = ("__module__", "__dict__", "__weakref__", "__firstlineno__", "__annotations__", "__annotations_cache__")
# Of a class, wherever it stands.


def _comparable(value: object) -> object:
    """Equal for functions of the same place with the same names, constants and defaults, and for the same literals.

    Their bytecode would not do: it is another one where an import stands in the same cell.
    """
    if isinstance(value, property):
        return [_comparable(function) for function in (value.fget, value.fset, value.fdel)]
    if isinstance(value, list | tuple):
        return [_comparable(item) for item in value]
    if isinstance(value, dict):
        return {repr(key): _comparable(item) for key, item in value.items()}
    if isinstance(value, type):
        return value.__qualname__
    function = getattr(value, "__func__", value)
    code = function if isinstance(function, CodeType) else getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return value if _is_literal(value) else type(value).__qualname__
    defaults = getattr(function, "__defaults__", None), getattr(function, "__kwdefaults__", None)
    values = [_comparable(each) for each in (code.co_consts, *defaults)]
    return getattr(function, "__qualname__", ""), code.co_names, code.co_varnames, values


def _is_literal(value: object) -> bool:
    """Whether its `repr` makes it again."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False
