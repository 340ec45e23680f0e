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
        "what", type=arguments.parse_folder, metavar="RUN|TABLE", help="folder of a run or sweep, or its table"
    )


def run(options: argparse.Namespace) -> int:
    from pflmpi.cluster import jobs

    folder: Path = options.what
    if folder.is_file():
        from pflmpi.sweep import table

        folder = table.find_sweep_folder(folder, None)
    queued = [job for job in jobs.find_jobs_in(folder, jobs.query_queue(os.environ)) if job.in_queue]
    if not queued:
        raise ConfigError(f"no job of yours works in {folder} or waits to; `pflmpi status` lists your jobs")
    # `12_[2-5]`, tasks that wait together, is cancelled as 12: all tasks of an array work in one folder.
    jobs.cancel([*dict.fromkeys(job.id.partition("_[")[0] for job in queued)], os.environ)
    for job in queued:
        print(printable(f"job {job.id} cancelled ({job.state}): {job.folder}"))
    print("what is complete is kept: submit the same again, and it continues")
    return 0
