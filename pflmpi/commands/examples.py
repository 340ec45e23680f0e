"""Write the included configurations, examples, launch wrappers and batch scripts into a folder.

pflmpi examples .
"""

import argparse
import shutil
from pathlib import Path

from pflmpi.errors import ConfigError

# In a checkout links to its folders; in a wheel files.
_INCLUDED = Path(__file__).parents[1] / "included"
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "environment", "quickstart", "test", "gpu-check")  # of no use outside


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="where to write them; created if need be")


def run(options: argparse.Namespace) -> int:
    """Copy each included folder; return the exit code."""
    folder: Path = options.folder
    included = sorted(path for path in _INCLUDED.iterdir() if path.name != "docs")  # `pflmpi docs` shows these
    for source in included:
        if (folder / source.name).exists():
            raise ConfigError(f"{folder / source.name} exists already; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for source in included:
        shutil.copytree(source, folder / source.name, ignore=_LEFT_OUT)
    names = ", ".join(f"{source.name}/" for source in included)
    print(f"{folder}: {names}; to begin, in that folder: pflmpi run configs/quickstart.yaml")
    return 0
