"""Show jobs and runs: queue state, rounds, the main measure, time left, and why one failed.

pflmpi status
pflmpi status runs/mine
"""

import argparse
import os
import re
from pathlib import Path

from pflmpi import arguments
from pflmpi.errors import ConfigError
from pflmpi.machine import expand_path
from pflmpi.terminal import print_json
from pflmpi.text import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        metavar="RUN|TABLE|JOB",
        help="folder of a run or sweep, its table, or a job's id (default: my jobs)",
    )
    parser.add_argument("--wait", action="store_true", help="wait for the end, with the exit code of the run")
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    from pflmpi.cluster import status, waiting

    target: Path | str | None = options.what  # a folder, the id of a job, or all jobs
    if isinstance(target, str) and not re.fullmatch(r"\d+(_\d+)?", target):
        target = _folder(expand_path(target))
    code = 0
    if options.wait:
        if target is None:
            raise ConfigError("--wait without a run or job to wait for; name it")
        code = waiting.wait_for(target, os.environ)
    if options.json:
        print_json(status.describe_as_json(target, os.environ))
        return code
    if target is None:
        lines = status.describe_my_jobs(os.environ)
    elif isinstance(target, str):
        lines = status.describe_job(target, os.environ)
    else:
        lines = status.describe_folder(target, os.environ)
    print("\n".join(map(printable, lines)))
    return code


def _folder(path: Path) -> Path:
    """The folder itself, or for a table the folder of its runs."""
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return path
    from pflmpi.sweep import table

    return table.find_sweep_folder(path, None)
