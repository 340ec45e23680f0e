"""What is shown on the terminal: text as it is, and no error when nobody reads it any more."""

import errno
import io
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

from pflmpi.text import printable

if TYPE_CHECKING:
    from rich.console import Console

_output: "list[_Stream]" = []  # stdout of this process, once `outlive_readers` was called


def console(**settings: Any) -> "Console":
    """A rich console without markup and emoji, which the name of a file or run may look like; see `text.printable`."""
    from rich.console import Console  # here: `--help` does without

    class Printing(Console):
        def render_str(self, text: str, **options: Any) -> Any:
            return super().render_str(printable(text), **options)

    terminal = Printing(markup=False, emoji=False, **settings)
    if terminal.width == 0:  # as some shells without a terminal say; rich would print nothing
        terminal.width = shutil.get_terminal_size().columns
    return terminal


def table_console(width: int, **settings: Any) -> "Console":
    """A console for tables, which has `width` characters in a line where neither a terminal nor COLUMNS says it."""
    return console(width=shutil.get_terminal_size((width, 0)).columns, **settings)


class _Stream(io.FileIO):
    """A standard stream; once it cannot be written, as after `| head`, what is written is dropped."""

    failure: OSError | None = None

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as error:
            if self.failure is None:
                self.failure = error
            return len(memoryview(content).cast("B"))


def outlive_readers() -> None:
    """Let this process continue when nobody reads its stdout or stderr, and open those that are closed.

    A run outlives the terminal and the pipe it was started in; a file must not become number 1 or 2 by accident.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for number, name in ((1, "stdout"), (2, "stderr")):
        before = getattr(sys, name)
        raw = _Stream(number, "w", closefd=False)
        if number == 1:
            _output[:] = [raw]
        stream = io.TextIOWrapper(
            io.BufferedWriter(raw),
            encoding=getattr(before, "encoding", "utf-8"),
            errors="backslashreplace",  # of a terminal without ±, of names that are no text
            line_buffering=getattr(before, "line_buffering", True) or number == 2,
            write_through=getattr(before, "write_through", False),
        )
        setattr(sys, name, stream)


def print_surely(text: str) -> None:
    """Print what must not be lost: on stderr if nobody reads stdout any more."""
    text = printable(text)
    print(text, flush=True)
    if _output and _output[0].failure is not None:
        print(text, file=sys.stderr, flush=True)


def output_problem() -> str | None:
    """Why some of the output could not be written; None if it was, or if its reader left of its own accord."""
    sys.stdout.flush()
    failure = _output[0].failure if _output else None
    return None if failure is None or failure.errno == errno.EPIPE else failure.strerror
