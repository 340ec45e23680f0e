"""Writes classes and functions of a notebook or script into files that other processes can import."""

import ast
import hashlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from symtable import SymbolTable, symtable
from types import ModuleType
from typing import Any

from pflmpi import atomic
from pflmpi.config.source_comparison import MAIN_MODULES, find_changes
from pflmpi.errors import ConfigError
from pflmpi.folder_modules import CLASSES, import_root, list_imported, read_files
from pflmpi.imported_modules import find_imported, refuse_changed


def reference(section: str, kind: Any) -> str:
    """Returns `module:Class` of a class or function, or `file:Class` of a file written for one of the main module.

    The file has the statements of the notebook or script that bind the names it uses; its name has a hash of these.

    Raises:
        ConfigError: the source cannot be found, or does not stand alone.
    """
    name, module = kind.__qualname__, kind.__module__
    instead = f"put it in a file and give its name there, './my_file.py:{kind.__name__}'"
    if "<locals>" in name:
        raise ConfigError(f"{section}: {name} is defined where no other process can import it; {instead}")
    if module not in MAIN_MODULES:
        return f"{module}:{name}"
    statements = _read_statements()
    if name not in statements:
        raise ConfigError(f"{section}: the source of {name} cannot be found; {instead}")
    namespace = vars(sys.modules[module])
    if namespace.get(name) != kind:
        older = f"{kind!r} is not the {name} in the source of this notebook or script any more"
        raise ConfigError(f"{section}: {older}; make it anew, or {instead}")
    source = _assemble_source(section, name, statements, namespace, instead)
    file = Path(_find_root(source.encode()), CLASSES, f"{name}_{hashlib.sha256(source.encode()).hexdigest()[:8]}.py")
    if not file.exists():
        with atomic.explain_write_error(file, instead):
            atomic.write(file, source.encode())
    file = file.absolute()
    root = import_root(file)
    refuse_changed(None, read_files(file, root, root), root)
    return f"{file}:{name}"


def _assemble_source(
    section: str, name: str, statements: dict[str, ast.stmt], namespace: Mapping[str, Any], instead: str
) -> str:
    """Returns the source of a name and of all that it uses, once it has been executed and gave the same values.

    Args:
        namespace: names and values of the main module.
        instead: what a user can do where this fails.
    """
    bindings: dict[str, ast.stmt] = {}
    try:
        for used in _used_names(name, statements, namespace):
            bindings[used] = _find_binding(used, statements.get(used), namespace[used])
    except ValueError as error:
        raise ConfigError(f"{section}: {name} uses {error}; {instead}") from None
    futures = filter(_is_future, statements.values())
    body = [*dict.fromkeys([*futures, *bindings.values()])]
    source = "\n\n".join(dict.fromkeys(map(ast.unparse, body))) + "\n"
    executed = sys.modules[CLASSES] = ModuleType(CLASSES)  # where data classes look up their annotations
    try:
        # In its own lines, on which instructions depend.
        exec(compile(ast.Module(body, []), f"<source of {name}>", "exec"), vars(executed))
    except Exception as error:
        raise ConfigError(f"{section}: the source of {name} does not stand alone ({error}); {instead}") from error
    finally:
        del sys.modules[CLASSES]
    for used in bindings:
        if changed := [*find_changes(used, namespace[used], vars(executed)[used])]:
            raise ConfigError(f"{section}: {used} is not as its source makes it ({', '.join(changed)}); {instead}")
    return source


def _find_root(source: bytes) -> Path:
    """Returns the folder of the script if a source imports modules beside it, else the working directory.

    Also where that folder cannot be written.
    """
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "").resolve()
    folder = script.parent
    beside = [path for path in list_imported(script, source, folder) if path.is_relative_to(folder)]
    is_written = os.access(folder, os.W_OK) and any(find_imported(path, folder) for path in beside)
    return folder if is_written else Path()


def _is_future(statement: ast.stmt) -> bool:
    """Whether a statement is `from __future__ import ...`, which changes how all others are compiled."""
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def _find_binding(name: str, statement: ast.stmt | None, value: object) -> ast.stmt:
    """Returns a statement that gives a name its value.

    Args:
        statement: the last one that binds it at the top level; None if it is bound otherwise.

    Raises:
        ValueError: there is no such statement; says of what.
    """
    if statement is not None and not isinstance(statement, ast.Assign | ast.AnnAssign):
        return statement
    if _is_literal(value):  # its present value, whatever has changed it
        return ast.parse(f"{name} = {value!r}").body[0]
    if statement is None:
        raise ValueError(f"{name}, a {type(value).__name__} that no statement of its own makes at the top level")
    if any(isinstance(node, ast.Call) for node in ast.walk(statement)):
        raise ValueError(f"{name}, a {type(value).__name__} made by a call")
    return statement


def _read_statements() -> dict[str, ast.stmt]:
    """Returns, for each name of the main module, the last statement of the notebook or script that binds it."""
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


def _used_names(
    name: str, statements: dict[str, ast.stmt], namespace: Mapping[str, Any], seen: tuple[str, ...] = ()
) -> Iterator[str]:
    """Yields the names that the statement of a name uses, each after those that it uses itself, and last the name."""
    text = ast.unparse(statements[name]) if name in statements else ""
    for used in sorted(set(_global_names(symtable(text, "", "exec")))):
        if used in namespace and used not in (name, *seen, "__name__"):
            yield from _used_names(used, statements, namespace, (*seen, name))
    yield name


def _global_names(scope: SymbolTable) -> Iterator[str]:
    """Yields the names that a scope, and those within it, take from the module."""
    for symbol in scope.get_symbols():
        if symbol.is_referenced() and (symbol.is_global() or scope.get_type() == "module"):
            yield symbol.get_name()
    for inner in scope.get_children():
        yield from _global_names(inner)


def _is_literal(value: object) -> bool:
    """Whether evaluating its `repr` gives an equal value."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False
