"""The table of runs on the page: bytes in the unit that suits them, the folder last."""

import math
import os
from collections.abc import Sequence

from pflmpi.analysis.page.html import PageTable
from pflmpi.analysis.summary import Line, cells
from pflmpi.text import scaled_bytes


def table(lines: Sequence[Line]) -> PageTable:
    """The lines of runs for readers; `runs.csv` has them in plain bytes, and the whole paths of the folders."""
    columns: dict[str, list[str | int | float]] = {}
    for name in [*(name for name in lines[0] if name != "folder"), "folder"]:
        values = [line[name] for line in lines]
        if "bytes" in name:
            name, values = _scaled(name, values)
        elif name == "folder":
            values = list(_below_common_folder([str(value) for value in values]))
        columns[name] = values
    rows = [cells(dict(zip(columns, each, strict=True))) for each in zip(*columns.values(), strict=True)]
    return PageTable(list(columns), rows, long=1)


def _below_common_folder(folders: Sequence[str]) -> Sequence[str]:
    """Paths relative to the deepest folder that contains all of them; a lone one is left as it is."""
    if len(set(folders)) == 1:
        return folders
    shared = os.path.commonpath([os.path.dirname(folder) for folder in folders])
    return [os.path.relpath(folder, shared) for folder in folders]


def _scaled(name: str, values: Sequence[str | int | float]) -> tuple[str, list[str | int | float]]:
    """A column of bytes in one unit for all runs, which its name says."""
    divisor, unit = scaled_bytes(max((value for value in values if not isinstance(value, str)), default=0))
    scaled = [math.nan if isinstance(value, str) else value / divisor for value in values]
    if name.startswith("bytes to"):
        return f"sent {name.removeprefix('bytes ')} ({unit})", list(scaled)
    return name.replace("(bytes)", f"({unit})"), list(scaled)
