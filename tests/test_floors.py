"""The rooms: a floor imports only lower floors, nothing imports in a circle, some libraries have one door."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "pflmpi"
FLOORS = {
    0: {
        "atomic",
        "early_signals",
        "errors",
        "limits",
        "tree",
        "vmap_lanes",
        "rng",
        "global_generators",
        "registry",
        "text",
        "machine",
        "module_names",
        "outside",
        "folder_modules",
        "imported_modules",
        "regular_file",
        "contained_hdf5",
        "terminal",
    },
    1: {"transports", "models", "data"},
    2: {"messages", "learning"},
    3: {"algorithms", "store"},
    4: {"runtime"},
    5: {"config", "experiment", "sweep", "cluster"},
    6: {"analysis", "doctor", "forecast", "scaling", "testing"},
    7: {"commands", "python", "arguments", "cli", "__main__"},
}
FLOOR = {room: floor for floor, rooms in FLOORS.items() for room in rooms}
BLIND = {"algorithms", "transports", "store"}  # same floor, may not see each other
DOORS = {
    "mpi4py": {"transports/mpi.py"},
    "torch.distributed": {"transports/torchdist.py"},
    "h5py": {"store", "analysis", "data/array_files.py", "contained_hdf5.py"},
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def imports(path: Path) -> set[str]:
    """All modules that a file imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room(name: str) -> str:
    return name.split(".")[1] if name.startswith("pflmpi.") else ""


def breaches(path: Path) -> Iterator[str]:
    """What a file imports and may not."""
    here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if here == "__init__":
        yield from (f"{path} imports {name}" for name in sorted(imports(path)) if room(name))
        return
    for imported in sorted({room(name) for name in imports(path)} - {"", here}):
        if imported not in FLOOR:
            if imported != "__version__":  # `from pflmpi import __version__`
                yield f"{path} imports {imported}, which is on no floor"
        elif FLOOR[imported] > FLOOR[here]:
            yield f"{path} (floor {FLOOR[here]}) imports {imported} (floor {FLOOR[imported]})"
        elif {here, imported} <= BLIND:
            yield f"{path} imports {imported}: {here} and {imported} are blind to each other"


def test_a_floor_imports_only_lower_floors():
    violations = [breach for path in modules() for breach in breaches(path)]
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize("library", DOORS)
def test_a_library_has_one_door(library):
    for path in modules():
        relative = str(path.relative_to(PACKAGE))
        if any(name == library or name.startswith(library + ".") for name in imports(path)):
            assert relative in DOORS[library] or relative.split("/")[0] in DOORS[library], (
                f"{relative} imports {library}"
            )


def test_rich_prints_text_as_it_is():
    paths = [str(path) for path in modules() if path.stem != "terminal" and "rich.console.Console" in imports(path)]
    assert not paths, f"{paths}: use `pflmpi.terminal.console`, in which names are no markup"


def test_no_import_circle():
    graph = {}
    names = {".".join(("pflmpi", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in modules()}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    for name, path in names.items():
        graph[name] = {imported for imported in imports(path) if imported in names and imported != name}
    done: set[str] = set()

    def walk(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import circle: {' -> '.join((*trail, name))}"
        if name not in done:
            for imported in sorted(graph[name]):
                walk(imported, (*trail, name))
            done.add(name)

    for name in sorted(graph):
        walk(name, ())


def test_the_root_has_only_the_ground_floor_and_the_command_line():
    loose = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__", "cli", "arguments"}
    assert loose <= FLOORS[0]


def test_private_functions_of_vmap_have_one_door():
    names = [path.name for path in modules() if "functorch" in path.read_text()]
    assert names == ["vmap_lanes.py"]


def test_environment_variables_are_read_only_where_a_run_is_started():
    allowed = {
        "__init__.py",  # notes the end of a script that a wrapper of launch/ has started
        "cli.py",  # hands it to what watches for signals
        "transports/detect.py",
        "data",
        "commands",
        "python",
        "doctor",
        "runtime/devices.py",
        "transports/torch_store.py",
        "transports/start.py",
    }
    for path in modules():
        relative = str(path.relative_to(PACKAGE))
        if "os.environ" in path.read_text():
            assert relative in allowed or relative.split("/")[0] in allowed, f"{relative} reads the environment"


@pytest.mark.parametrize("statement", ["import pflmpi", "import pflmpi.cli; pflmpi.cli.parser().format_help()"])
def test_help_imports_no_torch(statement):
    code = f"import sys; {statement}; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_report_imports_no_torch():
    rooms = "analysis.report", "analysis.table", "commands.report", "commands.progress", "scaling.page"
    code = f"import sys, {', '.join(f'pflmpi.{room}' for room in rooms)}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
