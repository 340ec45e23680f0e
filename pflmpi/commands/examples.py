"""Write the included configurations, examples, launch wrappers and batch scripts into a folder.

pflmpi examples .
"""

import argparse
import shutil
from pathlib import Path

# Links to the folders of the checkout, which a wheel holds as files.
_INCLUDED = Path(__file__).parents[1] / "included"
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "environment", "quickstart", "test", "gpu-check")  # for a checkout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="where to write them; created if need be")


def run(options: argparse.Namespace) -> int:
    """Copy each folder that is included; return the exit code."""
    from pflmpi.errors import ConfigError, explained

    folder: Path = options.folder
    included = sorted(path for path in _INCLUDED.iterdir() if path.name != "docs")  # which `pflmpi docs` shows
    for source in included:
        if (folder / source.name).exists():
            raise ConfigError(f"{folder / source.name} exists already; choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source in included:
            shutil.copytree(source, folder / source.name, ignore=_LEFT_OUT)
    except OSError as error:
        raise explained(error) from error
    names = ", ".join(f"{source.name}/" for source in included)
    print(f"{folder}: {names}; to begin, in that folder: pflmpi run configs/quickstart.yaml")
    return 0
