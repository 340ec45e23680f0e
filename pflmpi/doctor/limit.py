"""A time limit for what cannot be interrupted."""

import faulthandler
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TELL = "import select, sys\nif not select.select([0], [], [], float(sys.argv[1]))[0]: print(sys.argv[2], flush=True)"


@contextmanager
def limited(seconds: float, text: str) -> Iterator[None]:
    """Print the text and end this process with exit code 1 unless the block ends in time.

    MPI_Init waits for all ranks without a limit, and holds Python's lock meanwhile. So another process says the text,
    and faulthandler, which needs no lock, ends this one.
    """
    teller = subprocess.Popen([sys.executable, "-I", "-S", "-c", _TELL, str(seconds), text], stdin=subprocess.PIPE)
    assert teller.stdin is not None
    with open(os.devnull, "w") as nowhere:
        faulthandler.dump_traceback_later(seconds + 2, exit=True, file=nowhere)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            teller.stdin.close()
            teller.wait()
