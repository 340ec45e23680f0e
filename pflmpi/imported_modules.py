"""Whether an imported module of a user is as its files say, from which every other process imports it."""

import ast
import os
import sys
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

from pflmpi.errors import ConfigError
from pflmpi.folder_modules import parse
from pflmpi.text import short_repr
from pflmpi.value_comparison import are_alike

_first_uses = dict[Path, tuple[ModuleSpec, bytes]]()  # of imported modules: which import, and what its file held then


def refuse_changed(module: ModuleType, contents: dict[Path, bytes], root: Path) -> None:
    """Raise `ConfigError` for a file edited since its import, or a constant that has another value by now.

    A constant is bound once, to literals and dotted names; it is not empty, and the files do not change it themselves.

    Args:
        contents: the files of the module and of those beside it that it imports.
        root: where the names of imported modules begin.
    """
    imported = {path: other for path in contents if (other := _find_imported(path, root)) is not None}
    if edited := [path for path, other in imported.items() if _is_edited(path, other, contents[path])]:
        others = [other.__name__ for path, other in imported.items() if path in edited and other is not module]
        reloads = ", ".join(f"importlib.reload({name})" for name in [*others, module.__name__])
        raise ConfigError(
            f"{', '.join(map(str, edited))} changed after {module.__name__} was imported, and every other process has "
            f"it as it is now; reload it, {reloads}, and take what you use from it anew, or start Python anew"
        )
    set_by_files = {name for content in contents.values() for name in _read_names(content).changed}
    for path, other in imported.items():
        _refuse_set_constants(other, _read_names(contents[path]).constants, set_by_files)


def _find_imported(path: Path, root: Path) -> ModuleType | None:
    """The module that was imported from a file; None if there is none."""
    parts = path.relative_to(root).with_suffix("").parts
    module = sys.modules.get(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return module if getattr(module, "__file__", None) == str(path) else None


def _is_edited(path: Path, module: ModuleType, content: bytes) -> bool:
    """Whether a file was edited after the import of its module: after its first use here, or as its bytecode says."""
    spec = module.__spec__
    if spec is None:
        return False
    first_spec, first_content = _first_uses.get(path, (None, b""))
    if first_spec is spec:  # a reload makes another
        return first_content != content
    if _is_compiled_from_another(path, spec):
        return True
    _first_uses[path] = spec, content
    return False


def _is_compiled_from_another(path: Path, spec: ModuleSpec) -> bool:
    """Whether the bytecode that Python wrote at an import is of another version of the file."""
    if type(spec.loader) is not SourceFileLoader or spec.cached is None or sys.dont_write_bytecode:
        return False
    if not os.access(Path(spec.cached).parent, os.W_OK):  # it may be of an earlier process
        return False
    try:
        with open(spec.cached, "rb") as file:
            header = file.read(16)  # magic number, flags, seconds and bytes of the source: PEP 552
        stat = path.stat()
    except OSError:
        return False
    flags, *source = (int.from_bytes(header[start : start + 4], "little") for start in (4, 8, 12))
    return flags == 0 and source != [int(stat.st_mtime) & 0xFFFFFFFF, stat.st_size & 0xFFFFFFFF]


def _refuse_set_constants(module: ModuleType, constants: dict[str, CodeType], set_by_files: set[str]) -> None:
    """Raise `ConfigError` for a constant of a module that has another value by now, which no other process would have.

    Args:
        set_by_files: names that the files themselves change.
    """
    for name, expression in constants.items():
        if name not in vars(module) or name in set_by_files:
            continue
        value = vars(module)[name]
        try:
            expected = eval(expression, vars(module))
        except Exception:  # it was evaluated when what it names had other values
            continue
        if not are_alike(value, expected):
            raise ConfigError(
                f"{module.__name__}.{name} = {short_repr(value)}, but its file says {short_repr(expected)}, "
                "which every other process has; set it there, or make it an argument"
            )


class _Names(NamedTuple):
    """Names in a file: what it binds once, with the expression for its value, and those that it changes."""

    constants: dict[str, CodeType]
    changed: set[str]


_OF_CONSTANTS: tuple[type[ast.AST], ...] = (
    *(ast.Constant, ast.Name, ast.Attribute, ast.Tuple, ast.List, ast.Set, ast.Dict),
    *(ast.UnaryOp, ast.BinOp, ast.unaryop, ast.operator, ast.expr_context),
)
_CHANGES = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "reverse"}
_CHANGES |= {"setdefault", "sort", "update"}


@lru_cache(maxsize=1024)
def _read_names(content: bytes) -> _Names:
    tree = parse(content)
    nodes = [*ast.walk(tree)]
    bound = Counter(node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load))
    bound.update(name for node in nodes if isinstance(node, ast.Global) for name in node.names)
    constants = {}
    for statement in tree.body:
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
            continue
        target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
        if isinstance(target, ast.Name) and bound[target.id] == 1 and _is_constant(statement.value, bound):
            constants[target.id] = compile(ast.Expression(statement.value), "<constant>", "eval")
    return _Names(constants, {*_find_changed(nodes)})


def _find_changed(nodes: list[ast.AST]) -> Iterator[str]:
    """Yields names that a file may change: what it assigns to, calls a changing method of, or a function for."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield _last_name(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
            yield _last_name(node.func.value)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):  # whose result is not used
            yield from map(_last_name, node.value.args)


def _is_constant(expression: ast.expr, bound: Counter[str]) -> bool:
    """Whether evaluating an expression again gives its value: literals and names, of which none is bound twice."""
    if isinstance(expression, ast.List | ast.Set | ast.Dict) and not [*ast.iter_child_nodes(expression)]:
        return False  # to be filled
    nodes = [*ast.walk(expression)]
    names = [node.id for node in nodes if isinstance(node, ast.Name)]
    return all(isinstance(node, _OF_CONSTANTS) for node in nodes) and all(
        bound[name] <= 1 and name != "sys"
        for name in names  # whose attributes Python and notebooks change
    )


def _last_name(expression: ast.expr) -> str:
    """The name of a variable or attribute; "" for any other expression."""
    return str(getattr(expression, "attr", getattr(expression, "id", "")))
