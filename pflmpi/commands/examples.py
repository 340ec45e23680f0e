"""Write the included configurations, examples, launch wrappers and batch scripts into a folder.

pflmpi examples .
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from pflmpi import atomic
from pflmpi.errors import ConfigError

# In a checkout links to its folders; in a wheel files.
_INCLUDED = Path(__file__).parents[1] / "included"
_LEFT_OUT = {"__pycache__", "environment", "quickstart", "test", "gpu-check"}  # of no use outside


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="where to write them; created if need be")


def run(options: argparse.Namespace) -> int:
    folder: Path = options.folder
    included = sorted(path for path in _INCLUDED.iterdir() if path.name != "docs")  # `pflmpi docs` shows these
    for source in included:
        if (folder / source.name).exists():
            raise ConfigError(f"{folder / source.name} exists already; choose another folder")
    with atomic.explain_write_error(f"the examples in {folder}", "choose another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".examples-", dir=folder) as copies:
            for source in included:
                _copy(source, Path(copies, source.name))
            for source in included:
                Path(copies, source.name).rename(folder / source.name)
    names = ", ".join(f"{source.name}/" for source in included)
    print(f"{folder}: {names}; to begin, in that folder: pflmpi run configs/quickstart.yaml")
    return 0


def _copy(source: Path, target: Path) -> None:
    """Copy a file or folder; raises the first `OSError`, of which `shutil.copytree` keeps only the text."""
    if not source.is_dir():
        shutil.copy2(source, target)
        return
    target.mkdir()
    for path in source.iterdir():
        if path.name not in _LEFT_OUT:
            _copy(path, target / path.name)
