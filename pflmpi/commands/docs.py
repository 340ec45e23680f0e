"""List the pages of the documentation, or show one.

pflmpi docs
pflmpi docs clusters
"""

import argparse
import pydoc
from pathlib import Path

_PAGES = {path.stem: path for path in sorted(Path(__file__).parents[1].glob("included/docs/*.md"))}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "page to show, in a pager on a terminal (default: list them)"
    parser.add_argument("page", nargs="?", choices=_PAGES, metavar="NAME", help=about)


def run(options: argparse.Namespace) -> int:
    if options.page is not None:
        pydoc.pager(_PAGES[options.page].read_text(encoding="utf-8"))
        return 0
    for name, path in _PAGES.items():
        with path.open(encoding="utf-8") as lines:
            print(f"{name:<15}{lines.readline().lstrip('# ').strip()}")
    return 0
