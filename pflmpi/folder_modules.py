"""A user's file and the modules beside it: listed for the hash, and imported as those of this folder alone."""

import ast
import builtins
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import Lock
from types import CodeType, ModuleType
from typing import Any

MARK = "__pflmpi_outside__"  # a global of every module from outside
CLASSES = "pflmpi_classes"  # a folder of files written for what a notebook or script defines: see `config.main_source`


def import_root(file: Path) -> Path:
    """Returns the folder in which a file's imports begin: its own, or of a file in `CLASSES` the one above."""
    return file.parents[file.parent.name == CLASSES]


def read_files(file: Path, root: Path, within: Path) -> dict[Path, bytes]:
    """Reads a file and the files within a folder that it imports, directly or through one another; executes none.

    Args:
        root: where the names of imported modules begin.
        within: imported files elsewhere are left out.
    """
    contents, queue = dict[Path, bytes](), [file]
    while queue:
        path = queue.pop()
        if path not in contents:
            contents[path] = path.read_bytes()
            imported = list_imported(path, contents[path], root)
            queue += [other for other in imported if other.is_relative_to(within) and other.is_file()]
    return {path: contents[path] for path in sorted(contents)}


_PARSER = Lock()  # `ast.parse` of Python 3.11 fails in concurrent threads: they share a recursion counter


def parse(content: bytes) -> ast.Module:
    """The syntax tree of a file; an empty one where it is no Python source."""
    try:
        with _PARSER:
            return ast.parse(content)
    except (SyntaxError, ValueError):
        return ast.Module([], [])


@lru_cache(maxsize=1024)
def list_imported(path: Path, content: bytes, root: Path) -> list[Path]:
    """Returns the paths that the modules of all import statements would have."""
    return [other for node in ast.walk(parse(content)) for other in _imported(node, path, root)]


def _imported(node: ast.AST, path: Path, root: Path) -> Iterator[Path]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield from _paths(root, alias.name)
    elif isinstance(node, ast.ImportFrom):
        start, names = (path.parents[node.level - 1] if node.level else root), [alias.name for alias in node.names]
        yield from _paths(start, node.module or "", names)


def _paths(start: Path, module: str, names: Sequence[str] = ()) -> Iterator[Path]:
    """Paths that a module, and names in it, would have from a folder, and those of the packages around them."""
    for name in (module, *(f"{module}.{name}" for name in names)):
        place = start
        for part in filter(None, name.split(".")):
            place /= part
            yield place.with_name(f"{part}.py")
            yield place / "__init__.py"


class _Package(ModuleType):
    """The parent of the modules of a folder, in one version of its files.

    Attributes:
        contents: `read_files` of each file that was imported by its path.
    """

    def __init__(self, folder: Path, version: int) -> None:
        super().__init__(f"outside_{hashlib.sha256(f'{folder} {version}'.encode()).hexdigest()[:8]}")
        self.__path__ = [str(folder)]
        self.folder, self.version = folder, version
        self.contents: dict[Path, dict[Path, bytes]] = {}


_packages = dict[Path, _Package]()  # the newest of each folder


def import_file(file: Path, contents: dict[Path, bytes]) -> ModuleType:
    """Imports a file as a module, once for each version of it and of the files beside it that it imports.

    The files of a folder share the modules beside them. Once one of these files has changed, all are imported anew.

    Args:
        file: absolute.
        contents: what `read_files` gives for it.
    """
    folder = import_root(file)
    package = _packages.get(folder)
    if package is None or _has_changed(package):
        package = _packages[folder] = _Package(folder, package.version + 1 if package else 0)
        sys.modules[package.__name__] = package
        if _Finder not in sys.meta_path:
            sys.meta_path.insert(0, _Finder)
    package.contents[file] = contents
    name = f"{package.__name__}.{file.stem}"
    spec = _Finder.find_spec(name, package.__path__)
    if spec is None or spec.origin != str(file):  # it lies in `CLASSES`, beside a package of its name, or has a dot
        name = f"{package.__name__}.{file.name.replace('.', '-')}"
        spec = spec_from_file_location(name, file, loader=_Loader(name, str(file)))
    assert spec is not None and spec.loader is not None
    if name not in sys.modules:
        module = sys.modules[name] = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _has_changed(package: _Package) -> bool:
    """Whether a file that was imported, or one that it imports, is not as it was."""
    folder = package.folder
    try:
        return any(read_files(file, folder, folder) != content for file, content in package.contents.items())
    except OSError:
        return True


def holds_installed(folder: Path) -> bool:
    """Whether a folder is one into which packages are installed."""
    return folder.name in ("site-packages", "dist-packages")


@cache
def _find_installed(name: str) -> str | None:
    """Returns the file of the installed module of this name; None if there is none."""
    folders = [folder for folder in sys.path if holds_installed(Path(folder))]
    editable = (finder.find_spec(name, None) for finder in sys.meta_path if finder is not PathFinder)
    specs = (spec for spec in (PathFinder.find_spec(name, folders), *editable) if spec is not None)
    return next((spec.origin for spec in specs if spec.origin is not None), None)


def _is_installed(name: str, folder: Path) -> bool:
    """Whether the module of this name in a folder is installed, perhaps for editing; `ImportError` if another is."""
    if name == "pflmpi" or name in sys.stdlib_module_names:  # which no file of a user hides
        return True
    installed, own = _find_installed(name), [path for path in _paths(folder, name) if path.is_file()]
    if installed is not None and not any(path.samefile(installed) for path in own):
        raise ImportError(f"{folder / name} has the name of an installed module, {installed}; rename it")
    return installed is not None


def _import(
    package: _Package,
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    """`__import__` for the modules of a folder: what `read_files` lists is imported from there, all else as always."""
    if level and globals is not None and level > globals["__spec__"].parent.count("."):
        raise ImportError("attempted relative import with no known parent package")
    top, names = name.partition(".")[0], fromlist or ()
    is_beside = any(path.is_file() for path in _paths(package.folder, name, names))
    if level or not is_beside or _is_installed(top, package.folder):
        return __import__(name, globals, locals, names, level)
    module = __import__(f"{package.__name__}.{name}", globals, locals, names)
    return module if names else sys.modules[f"{package.__name__}.{top}"]


class _Loader(SourceFileLoader):
    """Executes a module of a folder, with imports of its own."""

    def get_code(self, fullname: str) -> CodeType:
        # No file of bytecode, which would be taken after a change of the same size in the same second.
        return self.source_to_code(self.get_data(self.path), self.path)

    def exec_module(self, module: ModuleType) -> None:
        package = sys.modules[module.__name__.partition(".")[0]]
        assert isinstance(package, _Package)
        own = {**vars(builtins), "__import__": partial(_import, package)}
        vars(module).update({MARK: True, "__builtins__": own})
        super().exec_module(module)


class _Finder:
    """Finds the modules of the folders that files were imported from."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not isinstance(sys.modules.get(name.partition(".")[0]), _Package):
            return None
        specs = (FileFinder(folder, (_Loader, SOURCE_SUFFIXES)).find_spec(name) for folder in path or ())
        return next(filter(None, specs), None)
