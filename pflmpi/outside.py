"""Code from outside the package, named `module:Class` or `file.py:Class`: loaded, hashed, named in its errors."""

import ast
import hashlib
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from threading import Lock
from types import ModuleType

from pflmpi.errors import ConfigError, PflmpiError
from pflmpi.machine import expand_path

_MARK = "__pflmpi_outside__"  # a global of every module loaded from outside: the reference that named it


def is_from_outside(kind: type) -> bool:
    """Whether a class is neither the package's nor Python's own."""
    return not kind.__module__.startswith(("pflmpi.", "builtins"))


def is_reference(name: str) -> bool:
    """Whether a name is `module:Class` or `file.py:Class` (or a file without its class, which `load` explains).

    >>> is_reference("./mine.py:FedMine"), is_reference("fedavg")
    (True, False)
    """
    return ":" in name or name.endswith(".py")


def make_absolute(name: str, folder: Path) -> str:
    """Make the file of a reference absolute, relative to `folder`; any other name is returned unchanged.

    >>> make_absolute("./mine.py:FedMine", Path("/home/me")), make_absolute("mine:FedMine", Path("/home/me"))
    ('/home/me/mine.py:FedMine', 'mine:FedMine')
    """
    place, _ = _split(name)
    if not place.endswith(".py"):
        return name
    return os.path.abspath(expand_path(place, folder)) + name.removeprefix(place)


def load(reference: str) -> object:
    """Load the class or function of a reference; its module is executed.

    Raises:
        ConfigError: it cannot be found or imported; names file, line and reason.
    """
    place, name = _split(reference)
    file = Path(place) if place.endswith(".py") else None
    if not name:
        raise ConfigError(f"{reference} names no class; write {reference}:CLASS; {_names_in(file)}")
    module = _import_file(file, reference) if file is not None else _import_module(place, reference)
    try:
        return getattr(module, name)
    except AttributeError:
        raise ConfigError(f"{place} has no {name!r}; {_names_in(Path(str(module.__file__)))}") from None


def code_hash(reference: str) -> str:
    """SHA-256 (hex) over the file of a reference and what it imports from its folder or package; executes no file."""
    place, _ = _split(reference)
    if not place.endswith(".py"):
        return _module_hash(place)
    file = Path(place)
    return _digest(file, file.parent, file.parent)


@cache  # a large package takes seconds, and an imported module no longer changes
def _module_hash(place: str) -> str:
    spec = find_spec(place)
    if spec is None or spec.origin is None:
        raise ConfigError(f"module {place} has no source file; give the file, as path/to/file.py:CLASS")
    file = Path(spec.origin)
    root = file.parents[place.count(".") + (file.name == "__init__.py")]
    return _digest(file, root, root / place.partition(".")[0])


def describe_cause(error: BaseException) -> str | None:
    """Location in code from outside, class and text of an error; None if it passed through no such code."""
    where = find_location(error)
    return f"{where}: {type(error).__name__}: {error}" if where else None


def find_location(error: BaseException) -> str | None:
    """File, line and function of the innermost frame of code from outside; None if there is none.

    Frames without a file, such as the methods that @dataclass writes, do not count.
    """
    location = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if _MARK in frame.f_globals and frame.f_code.co_filename != "<string>":
            location = f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_qualname}"
    return location


def file_of(kind: type) -> str:
    """The file of a class, or its module where it has none, as in a notebook."""
    return str(getattr(sys.modules.get(kind.__module__), "__file__", None) or kind.__module__)


@contextmanager
def as_config_error() -> Iterator[None]:
    """Turn an unexpected error of code from outside into a `ConfigError` that names file, line and method."""
    try:
        yield
    except PflmpiError:
        raise
    except (Exception, SystemExit) as error:
        if text := describe_cause(error):
            raise ConfigError(text) from error
        raise


def _split(reference: str) -> tuple[str, str]:
    """Module or file, and the name in it."""
    place, colon, name = reference.rpartition(":")
    return (place, name) if colon else (reference, "")


def _import_file(file: Path, reference: str) -> ModuleType:
    """Import a file as a module; it is executed once for each version of its content."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read: {error.strerror}; a file is named relative to the configuration, with -s relative "
            "to the working directory; for a run, -s with the key that names it, such as -s algorithm.name=PATH:CLASS, "
            "says where it is now"
        ) from error
    name = f"{file.stem}_{hashlib.sha256(str(file).encode() + content).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, file)
    assert spec is not None
    module = module_from_spec(spec)
    module.__dict__[_MARK] = reference
    if (folder := str(file.parent)) not in sys.path:
        sys.path.append(folder)  # last, so that files beside it hide nothing that is installed
    sys.modules[name] = module  # dataclasses look up their module
    try:
        with _importing(str(file), file):
            exec(compile(content, file, "exec"), module.__dict__)
    except ConfigError:
        del sys.modules[name]
        raise
    return module


def _import_module(place: str, reference: str) -> ModuleType:
    if place.startswith(".") or os.sep in place:
        raise ConfigError(f"{place} is no module; the name of a file ends in .py: {place}.py:CLASS")
    with _importing(f"module {place}"):
        try:
            module = import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise
            raise ConfigError(
                f"there is no module {error.name!r}; install the package that has it, put its folder on PYTHONPATH, or "
                "give a file, as path/to/file.py:CLASS"
            ) from error
    module.__dict__.setdefault(_MARK, reference)
    return module


@contextmanager
def _importing(what: str, file: Path | None = None) -> Iterator[None]:
    """Turn an error of an import into a `ConfigError` that names file, line and reason."""
    try:
        yield
    except PflmpiError:
        raise
    except SyntaxError as error:
        raise ConfigError(f"{error.filename}:{error.lineno}: syntax error: {error.msg}") from error
    except (Exception, SystemExit) as error:
        where = describe_cause(error) or f"{what}: {type(error).__name__}: {error}"
        cure = _as_module(file) if file is not None and "no known parent package" in str(error) else ""
        raise ConfigError(f"cannot import {where}{cure}") from error


def _as_module(file: Path) -> str:
    """Advice on naming a class in a file that belongs to a package."""
    folder, names = file.parent, [file.stem]
    while not names[1:] or (folder / "__init__.py").is_file():
        folder, names = folder.parent, [folder.name, *names]
    return f"; it belongs to a package: put {folder} on PYTHONPATH, and write {'.'.join(names)}:CLASS"


_PARSER = Lock()  # `ast.parse` of Python 3.11 fails in concurrent threads: they share a recursion counter


def _names_in(file: Path | None) -> str:
    """The classes and functions of a file, for an error message."""
    names = []
    if file is not None and (tree := _parsed(file)) is not None:
        names = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return f"known: {', '.join(names) or 'none'}"


def _digest(file: Path, root: Path, within: Path) -> str:
    """SHA-256 (hex) over a file and the files within a folder that it imports, directly or through one another.

    Args:
        root: where the names of imported modules begin.
        within: imported files elsewhere are left out.
    """
    files, queue = set[Path](), [file]
    while queue:
        path = queue.pop()
        if path in files:
            continue
        files.add(path)
        for node in ast.walk(_parsed(path) or ast.Module([], [])):
            queue += [
                other for other in _imported(node, path, root) if other.is_relative_to(within) and other.is_file()
            ]
    total = hashlib.sha256()
    for path in sorted(files):
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
    """Paths that the modules of an import statement would have, and those of the packages around them."""
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
