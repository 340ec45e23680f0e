"""Ending the process of a rank with an exit code."""

import os
import sys
from typing import NoReturn

from pflmpi.transports.base import Transport


def exit_process(transport: Transport, code: int) -> NoReturn:
    """Close the transport and end this process with the exit code.

    With several ranks this bypasses the interpreter's shutdown: torch may keep its group, and gloo's threads with it,
    beyond `close` (it does once torch.func.vmap was used), and such a thread can abort a process that succeeded.
    """
    transport.close()
    flush_output()
    if transport.size > 1:
        os._exit(code)
    raise SystemExit(code)


def flush_output() -> None:
    """Flush stdout and stderr, which `os._exit` does not do."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
