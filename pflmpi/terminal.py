"""Terminal output: consoles without markup, JSON, and standard streams that survive a closed pipe."""

import errno
import io
import json
import math
import os
import shutil
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pflmpi.text import printable

if TYPE_CHECKING:
    from rich.console import Console


_UNLIMITED_WIDTH = 1 << 16  # columns; a table takes what it needs


def console(**settings: Any) -> "Console":
    """A rich console without markup and emoji, because file names may look like them; see `text.printable`.

    Without a terminal and without COLUMNS lines have any length, so that scripts read whole paths.
    """
    from rich.console import Console  # here: `--help` does not need it

    class Printing(Console):
        def render_str(self, text: str, **options: Any) -> Any:
            return super().render_str(printable(text), **options)

    terminal = Printing(markup=False, emoji=False, **settings)
    if not terminal.stderr:  # rich would take the width of any of the three streams, 80, or 0 and print nothing
        terminal.width = shutil.get_terminal_size((_UNLIMITED_WIDTH, 0)).columns
    elif terminal.width == 0:
        terminal.width = shutil.get_terminal_size().columns
    return terminal


class _Stream(io.FileIO):
    """A standard stream that drops output that cannot be written, as after `| head`."""

    failure: OSError | None = None

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as error:
            if self.failure is None:
                self.failure = error
            return len(memoryview(content).cast("B"))


def outlive_readers() -> None:
    """Lets this process continue when its stdout or stderr is closed or no longer read.

    A run outlives the terminal and the pipe it was started in; a file must not become number 1 or 2 by accident.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for number, name in ((1, "stdout"), (2, "stderr")):
        before = getattr(sys, name)
        stream = io.TextIOWrapper(
            io.BufferedWriter(_Stream(number, "w", closefd=False)),
            encoding=getattr(before, "encoding", "utf-8"),
            errors="backslashreplace",  # for terminals without ±, and file names that are not UTF-8
            line_buffering=getattr(before, "line_buffering", True) or number == 2,
            write_through=getattr(before, "write_through", False),
        )
        setattr(sys, name, stream)


def print_json(content: Mapping[str, Any]) -> None:
    """Prints one JSON object, as docs/scripts.md lists its keys."""
    print(json.dumps(_plain(content)))


def _plain(value: Any) -> Any:
    """Convert to the types of JSON: NaN and infinities are null, NumPy's values numbers and lists, paths strings."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int) else str(value)


def output_problem() -> str | None:
    """Why output was lost; None if it was not, or if the reader closed the pipe."""
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    failure = raw.failure if isinstance(raw, _Stream) else None
    return None if failure is None or failure.errno == errno.EPIPE else failure.strerror
