"""Whether an imported module of a user is as its files say, from which every other process imports it."""

import ast
import os
import sys
from collections import Counter
from collections.abc import Hashable
from contextlib import suppress
from functools import lru_cache
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from pflmpi.errors import ConfigError
from pflmpi.folder_modules import parse
from pflmpi.text import short_repr

_first_uses = dict[Path, tuple[ModuleSpec, bytes]]()  # of imported modules: which import, and what its file held then


def refuse_changed(module: ModuleType | None, contents: dict[Path, bytes], root: Path) -> None:
    """Raise `ConfigError` for a file edited since its import, or a literal that has another value by now.

    Literals of mutable types, and names that are bound more than once, are left out.

    Args:
        module: from which a part is taken; None for the main module.
        contents: the files of the module and of those beside it that it imports.
        root: where the names of imported modules begin.
    """
    imported = {path: other for path in contents if (other := find_imported(path, root)) is not None}
    if edited := [path for path, other in imported.items() if _is_edited(path, other, contents[path])]:
        names = [other.__name__ for path, other in imported.items() if path in edited and other is not module]
        if module is not None:
            names.append(module.__name__)
        reloads = ", ".join(f"importlib.reload({name})" for name in names)
        raise ConfigError(
            f"{', '.join(map(str, edited))} changed after {names[-1]} was imported, and every other process has "
            f"it as it is now; reload it, {reloads}, and take what you use from it anew, or start Python anew"
        )
    set_by_files = {name for content in contents.values() for name in _read_names(content).attributes}
    for path, other in imported.items():
        _refuse_set_constants(other, _read_names(contents[path]).literals, set_by_files)


def find_imported(path: Path, root: Path) -> ModuleType | None:
    """Returns the module that was imported from a file; None if there is none."""
    parts = path.relative_to(root).with_suffix("").parts
    module = sys.modules.get(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    file = getattr(module, "__file__", None)
    return module if file is not None and os.path.realpath(file) == os.path.realpath(path) else None


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


def _refuse_set_constants(module: ModuleType, literals: dict[str, Hashable], set_by_files: set[str]) -> None:
    """Raise `ConfigError` for a literal of a module that has another value by now, which no other process would have.

    Args:
        set_by_files: names of attributes that the files themselves assign.
    """
    for name, literal in literals.items():
        value = vars(module).get(name, literal)
        if name not in set_by_files and (type(value), value) != (type(literal), literal):
            raise ConfigError(
                f"{module.__name__}.{name} = {short_repr(value)}, but its file says {short_repr(literal)}, "
                "which every other process has; set it there, or make it an argument"
            )


class _Names(NamedTuple):
    """Names in a file: those that it binds once, to a literal, and attributes that it assigns."""

    literals: dict[str, Hashable]
    attributes: set[str]


@lru_cache(maxsize=1024)
def _read_names(content: bytes) -> _Names:
    tree = parse(content)
    nodes = [*ast.walk(tree)]
    stored = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    bound = Counter(node.id for node in stored if isinstance(node, ast.Name))
    bound.update(name for node in nodes if isinstance(node, ast.Global) for name in node.names)
    literals = {}
    for statement in tree.body:
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
            continue
        target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
        if isinstance(target, ast.Name) and bound[target.id] == 1:
            with suppress(ValueError, TypeError):
                literal = ast.literal_eval(statement.value)
                if isinstance(literal, Hashable):
                    literals[target.id] = literal
    return _Names(literals, {node.attr for node in stored if isinstance(node, ast.Attribute)})
