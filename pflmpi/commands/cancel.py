"""Cancel the jobs of a run or a sweep.

pflmpi cancel runs/mine
"""

import argparse
import os
from pathlib import Path

from pflmpi import arguments
from pflmpi.errors import ConfigError
from pflmpi.text import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", type=arguments.folder, metavar="RUN|TABLE", help="folder of a run or sweep, or its table"
    )


def run(options: argparse.Namespace) -> int:
    """Cancel all jobs that work in a folder or wait to, and say which; return the exit code."""
    from pflmpi.cluster import jobs

    folder: Path = options.what
    if folder.is_file():
        from pflmpi.sweep import table

        folder = table.folder(folder, None)
    working = [job for job in jobs.jobs_in(folder, jobs.queue(os.environ)) if job.in_queue]
    if not working:
        raise ConfigError(f"no job of yours works in {folder} or waits to; `pflmpi status` lists your jobs")
    # Tasks of an array that wait together are all that is left of it.
    jobs.cancel([*dict.fromkeys(job.id.partition("_[")[0] for job in working)], os.environ)
    for job in working:
        print(printable(f"job {job.id} cancelled ({job.state}): {job.folder}"))
    print("what is complete is kept: submit the same again, and it continues")
    return 0
