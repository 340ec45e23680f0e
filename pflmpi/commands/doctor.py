"""`pflmpi doctor`, on every rank."""

import argparse
import logging
import os
import traceback
from collections.abc import Sequence

from pflmpi.commands.launch import report
from pflmpi.errors import PflmpiError

_FOUND = 1


def main(options: argparse.Namespace, given: Sequence[str]) -> int:
    """Look for what would break a run; return the exit code."""
    logging.basicConfig(level=logging.DEBUG if options.debug else logging.ERROR, format="pflmpi: %(message)s")
    try:
        from pflmpi.doctor.run import check_environment
    except ImportError as error:  # one of the packages that even the doctor needs
        print(f"problem: {error}; install pflmpi with all that it needs: pip install -e . where its setup.cfg is")
        return _FOUND
    try:
        return check_environment(options.config, options.out, os.environ)
    except PflmpiError as error:
        if options.debug:
            traceback.print_exception(error)
        report(error)
        return error.exit_code
