"""Ending the process of a rank with an exit code."""

import os
import sys
import time
from collections.abc import Mapping
from typing import NoReturn

from pflmpi.errors import TransportError, show, write_exit_code
from pflmpi.transports.base import Transport

_HEAD_START = 3.0  # seconds for rank 0 to say it for all


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


def exit_unconnected(rank: int, environ: Mapping[str, str], text: str) -> NoReturn:
    """End this process, whose main thread waits for other ranks in a library, with an error."""
    if rank == 0:
        write_exit_code(environ, TransportError.exit_code)
    else:
        time.sleep(_HEAD_START)
    show(TransportError(text), rank=rank)
    flush_output()
    os._exit(TransportError.exit_code)


def flush_output() -> None:
    """Flush stdout and stderr, which `os._exit` does not do."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
