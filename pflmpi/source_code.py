"""Python source code read without being executed: the classes in a file, and a hash of it with what it imports."""

import ast
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Lock

_PARSER = Lock()  # Python 3.11 counts the depth of a tree for all threads together, and finds it wrong


def known(file: Path | None) -> str:
    """The classes and functions of a file, for an error."""
    names = []
    if file is not None and (tree := _parsed(file)) is not None:
        names = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return f"known: {', '.join(names) or 'none'}"


def digest(file: Path, root: Path, within: Path) -> str:
    """SHA-256 (hex) over a file and the files within a folder that it imports, directly or through one another.

    Args:
        root: where the names of imported modules begin.
        within: imported files elsewhere are left out.
    """
    found, queue = set[Path](), [file]
    while queue:
        path = queue.pop()
        if path in found:
            continue
        found.add(path)
        for node in ast.walk(_parsed(path) or ast.Module([], [])):
            queue += [
                other for other in _imported(node, path, root) if other.is_relative_to(within) and other.is_file()
            ]
    total = hashlib.sha256()
    for path in sorted(found):
        content = path.read_bytes()
        total.update(f"{os.path.relpath(path, root)} {len(content)}\n".encode() + content)
    return total.hexdigest()


def _parsed(file: Path) -> ast.Module | None:
    """The syntax tree of a file; None for one that is no Python source."""
    try:
        with _PARSER:
            return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def _imported(node: ast.AST, path: Path, root: Path) -> Iterator[Path]:
    """Where the modules of an import statement would lie, with the packages that they are in."""
    if isinstance(node, ast.Import):
        modules = [(root, alias.name) for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        start, base = (path.parents[node.level - 1] if node.level else root), node.module or ""
        modules = [(start, base), *((start, f"{base}.{alias.name}") for alias in node.names)]
    else:
        return
    for start, module in modules:
        place = start
        for part in filter(None, module.split(".")):
            place /= part
            yield place.with_name(f"{part}.py")
            yield place / "__init__.py"
