"""Show jobs, their rounds, accuracy and time left."""

import argparse
import os
import re
from pathlib import Path

from pflmpi.text import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Registers the command-line arguments."""
    parser.add_argument("what", nargs="?", metavar="RUN|JOB", help="a run's folder or a job's id (default: my jobs)")


def run(options: argparse.Namespace) -> int:
    """Show all jobs of this user, one job, or a run or sweep with its jobs; return the exit code."""
    from pflmpi.cluster import status

    what: str | None = options.what
    if what is None:
        lines = status.my_jobs(os.environ)
    elif re.fullmatch(r"\d+(_\d+)?", what):
        lines = status.one_job(what, os.environ)
    else:
        lines = status.one_folder(Path(what), os.environ)
    print("\n".join(map(printable, lines)))
    return 0
