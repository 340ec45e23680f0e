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
from importlib.util import find_spec
from pathlib import Path
from threading import RLock
from types import ModuleType

from pflmpi.errors import ConfigError, PflmpiError
from pflmpi.folder_modules import CLASSES, MARK, holds_installed, import_file, import_root, parse, read_files
from pflmpi.imported_modules import refuse_changed
from pflmpi.machine import expand_path


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
    module = _import_file(file) if file is not None else _import_module(place)
    try:
        return getattr(module, name)
    except AttributeError:
        raise ConfigError(f"{place} has no {name!r}; {_names_in(Path(str(module.__file__)))}") from None


def code_hash(reference: str) -> str:
    """SHA-256 (hex) over the file of a reference and what it imports from its folder or package; executes no file.

    Of an installed module without a package it is the file alone: beside it lie all installed packages.
    """
    place, _ = _split(reference)
    if place.endswith(".py"):
        file = Path(place)
        return _digest(file, import_root(file), import_root(file))
    file, root, within = _find_module(place)
    return (_installed_digest if holds_installed(root) else _digest)(file, root, within)


def _find_module(place: str) -> tuple[Path, Path, Path]:
    """The file of a module, the folder in which its name begins, and that of the files which its hash may cover."""
    try:
        spec = find_spec(place)
    except ValueError:  # a module that has none, such as __main__
        spec = None
    if spec is None or spec.origin is None:
        raise ConfigError(f"module {place} has no source file; give the file, as path/to/file.py:CLASS")
    file = Path(spec.origin)
    if not file.is_file():
        raise ConfigError(f"{file}, of module {place}, is in an archive; unpack it, and put the folder on PYTHONPATH")
    root = file.parents[place.count(".") + (file.name == "__init__.py")]
    if file.parent == root:  # a module without a package
        return file, root, file if holds_installed(root) else root
    return file, root, root / place.partition(".")[0]


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
        if MARK in frame.f_globals and frame.f_code.co_filename != "<string>":
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


_FILE_IMPORT = RLock()  # another thread gets no module of which only the first lines have run


def _import_file(file: Path) -> ModuleType:
    file = Path(os.path.abspath(file))
    try:
        contents = read_files(file, import_root(file), import_root(file))
    except OSError as error:
        raise ConfigError(
            f"{error.filename} cannot be read: {error.strerror}; a file is named relative to the configuration, with "
            "-s relative to the working directory; for a run, -s with the key that names it, such as "
            "-s algorithm.name=PATH:CLASS, says where it is now"
        ) from error
    with _importing(str(file), file), _FILE_IMPORT:
        return import_file(file, contents)


def _import_module(place: str) -> ModuleType:
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
    vars(module)[MARK] = True
    if module.__spec__ is not None and module.__spec__.has_location:
        file, root, within = _find_module(place)
        refuse_changed(module, read_files(file, root, file if holds_installed(root) else within), root)
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


def _names_in(file: Path | None) -> str:
    """The classes and functions of a file, for an error message."""
    names = [node.name for node in _read_source(file).body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return f"known: {', '.join(names) or 'none'}"


def _read_source(file: str | Path | None) -> ast.Module:
    """The syntax tree of a file; an empty one where it cannot be read, or is no Python source."""
    try:
        return parse(Path(file).read_bytes() if file is not None else b"")
    except OSError:
        return parse(b"")


def _digest(file: Path, root: Path, within: Path) -> str:
    """SHA-256 (hex) over a file and those of `read_files`; one in `CLASSES` counts as lying beside the others."""
    total = hashlib.sha256()
    for path, content in read_files(file, root, within).items():
        name = os.path.relpath(path, root).removeprefix(f"{CLASSES}{os.sep}")
        total.update(f"{name} {len(content)}\n".encode() + content)
    return total.hexdigest()


_installed_digest = cache(_digest)  # a large package takes seconds, and is installed once
