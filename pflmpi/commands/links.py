"""A rank that times the link to another one, for `pflmpi plan`: python -m pflmpi.commands.links FILE."""

import os
import sys
from pathlib import Path

from pflmpi.commands import rank  # noqa: F401  so that this rank is as large as one of a run
from pflmpi.forecast.links import work
from pflmpi.transports import open_transport
from pflmpi.transports.detect import detect
from pflmpi.transports.process_exit import exit_process

_TIMEOUT = 60.0  # seconds

if __name__ == "__main__":
    transport = open_transport("torch", detect(os.environ), _TIMEOUT)
    work(transport, Path(sys.argv[1]))
    exit_process(transport, 0)
